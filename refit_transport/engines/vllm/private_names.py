"""The private names of vLLM that this package uses, checked before the first use."""

from __future__ import annotations

import importlib
from functools import cache

TESTED_VERSION = "0.32"

PRIVATE_NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.model_executor.model_loader.reload.layerwise", "LAYERWISE_INFO"),
    ("vllm.model_executor.model_loader.reload.layerwise", "_get_original_loader"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_LOAD_TENSORS"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_TENSORS"),
    ("vllm.model_executor.model_loader.reload.meta", "to_meta_tensor"),
    ("vllm.model_executor.model_loader.reload.meta", "materialize_meta_tensor"),
    ("vllm.model_executor.model_loader.reload.sanitize", "restore_layer_refs"),
    ("vllm.model_executor.model_loader.mtp_validation", "disable_mtp_completeness_check"),
    ("vllm.model_executor.layers.attention", "is_deferred_attention_layer"),
    ("vllm.model_executor.layers.linear", "LinearBase"),
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"),
    ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts"),
    ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    ("vllm.config", "set_current_vllm_config"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory"),
    ("vllm.distributed.weight_transfer.factory", "WeightTransferTrainerFactory"),
)
"""Module and attribute. vLLM promises none of them to outside code."""


@cache
def check_private_names() -> None:
    """Raises RuntimeError that lists every name this version of vLLM lacks."""
    missing = []
    for module, name in PRIVATE_NAMES:
        try:
            if not hasattr(importlib.import_module(module), name):
                missing.append(f"{module}.{name}")
        except ImportError as error:
            missing.append(f"{module} ({error})")
    if missing:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}, which refit_transport relies on; "
            f"it was tested with vLLM {TESTED_VERSION}. Install that version or a refit_transport made for yours."
        )
