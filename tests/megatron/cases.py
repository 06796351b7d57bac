"""Layouts of Megatron models and the tiny checkpoints they are proven on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests import models

_QWEN2 = {key: value for key, value in models.FAMILIES["qwen3"][2].items() if key != "head_dim"}
_QWEN2_MOE = dict(
    _QWEN2, moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2
)
FAMILIES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _QWEN2),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", _QWEN2_MOE),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint family with overrides of its configuration, and how Megatron cuts it over ``ranks``."""

    family: str
    ranks: int
    cut: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    inexact_step: str = ""
    """Why an optimizer step differs from that of one process."""

    def checkpoint(self, path: Path, dtype: str = "float32") -> Path:
        """Written to ``path``, with random weights."""
        with patch.dict(models.FAMILIES, FAMILIES):
            return models.make_model(self.family, path, seed=1, dtype=dtype, **self.model)


def cut(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int = 1, sp: bool = False, **more: Any
) -> dict[str, Any]:
    """``policy.megatron_cfg`` for these sizes."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": sp,
    } | more


ONE_LAYER = {"num_hidden_layers": 1}
SMALL_LATENT = {"kv_lora_rank": 64}
ALL_DENSE = {"first_k_dense_replace": 2, "kv_lora_rank": 64}
ROTARY_KEY = (
    "Megatron's own layers, unlike those of TransformerEngine, lose a part of the gradient of the rotary key that all "
    "heads share"
)
LLAMA_3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
YARN = SMALL_LATENT | {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
}
FOUR_LAYERS = {"num_hidden_layers": 4}

CASES = {
    "tp1": Case("qwen3", 1, cut()),
    "tp2": Case("qwen3", 2, cut(tp=2)),
    "dp2": Case("qwen3", 2, cut()),
    "tp2 tied": Case("qwen3_tied", 2, cut(tp=2)),
    "llama tp2": Case("llama", 2, cut(tp=2)),
    "llama tp2 with scaled rotary embeddings": Case("llama", 2, cut(tp=2), LLAMA_3),
    "qwen2, biases, tp2": Case("qwen2", 2, cut(tp=2)),
    "tp4, two key-value heads": Case("qwen3", 4, cut(tp=4), ONE_LAYER),
    "tp2 with sequence parallelism": Case("qwen3", 2, cut(tp=2, sp=True)),
    "pp2": Case("qwen3", 2, cut(pp=2)),
    "pp2 tied": Case("qwen3_tied", 2, cut(pp=2)),
    "tp2 pp2": Case("qwen3", 4, cut(tp=2, pp=2)),
    "pp2 vpp2": Case("qwen3", 2, cut(pp=2, vpp=2), FOUR_LAYERS),
    "pp2 vpp2 tied": Case("qwen3_tied", 2, cut(pp=2, vpp=2), FOUR_LAYERS),
    "uneven pp2": Case("qwen3", 2, cut(pp=2, num_layers_in_first_pipeline_stage=1), {"num_hidden_layers": 3}),
    "pp2, embedding and loss count": Case(
        "qwen3",
        2,
        cut(pp=2, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
        FOUR_LAYERS,
    ),
    "custom pipeline layout": Case("qwen3", 2, cut(pp=2, pipeline_model_parallel_layout="Et|tttL"), FOUR_LAYERS),
    "custom pipeline layout, vpp2": Case(
        "qwen3", 2, cut(pp=2, pipeline_model_parallel_layout="E|t|tt|tL"), FOUR_LAYERS
    ),
    "mixtral ep2": Case("mixtral", 2, cut(ep=2)),
    "moe ep2": Case("qwen3_moe", 2, cut(ep=2)),
    "moe ep2, allgather": Case("qwen3_moe", 2, cut(ep=2, moe_token_dispatcher_type="allgather")),
    "moe tp2 etp2": Case("qwen3_moe", 2, cut(tp=2, etp=2, sp=True), ONE_LAYER),
    "moe tp2 ep2 etp1": Case("qwen3_moe", 2, cut(tp=2, ep=2, sp=True), ONE_LAYER),
    "moe tp2 ep2 etp2": Case("qwen3_moe", 4, cut(tp=2, ep=2, etp=2, sp=True), ONE_LAYER),
    "moe pp2 ep2": Case("qwen3_moe", 4, cut(pp=2, ep=2)),
    "shared experts, biases, tp2 ep2": Case("qwen2_moe", 2, cut(tp=2, ep=2, sp=True), ONE_LAYER),
    "mla, shared experts, router bias, ep2": Case("deepseek_v3", 2, cut(ep=2), SMALL_LATENT),
    "mla with yarn, ep2": Case("deepseek_v3", 2, cut(ep=2), YARN),
    "mla tp2": Case("deepseek_v3", 2, cut(tp=2), ALL_DENSE, ROTARY_KEY),
    "mla tp2 with sequence parallelism": Case("deepseek_v3", 2, cut(tp=2, sp=True), SMALL_LATENT, ROTARY_KEY),
}
