"""From the configuration to the arguments of vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refit_transport.config.engine_shape import EngineShape

BACKEND = "nccl_reshard"
"""Name under which the project's engine is registered in vLLM; it serves every transport of this project."""

EXTENSION = "refit_transport.engines.vllm.extension.RefitExtension"


def engine_args(tree: Mapping[str, Any], vllm: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for one engine, of which ``vllm`` is the ``vllm_cfg``; ``policy.generation.vllm_kwargs`` come last and
    win."""
    policy = tree["policy"]
    return {
        "model": policy["model_name"],
        "tokenizer": policy["tokenizer"]["name"],
        "dtype": vllm["precision"],
        "tensor_parallel_size": vllm["tensor_parallel_size"],
        "pipeline_parallel_size": vllm["pipeline_parallel_size"],
        "distributed_executor_backend": _executor(tree, vllm),
        "enable_expert_parallel": vllm["expert_parallel_size"] > 1,
        "max_model_len": vllm["max_model_len"],
        "enforce_eager": vllm["enforce_eager"],
        "gpu_memory_utilization": vllm["gpu_memory_utilization"],
        "kv_cache_dtype": vllm["kv_cache_dtype"],
        "load_format": vllm["load_format"],
        "logprobs_mode": vllm["logprobs_mode"],
        "seed": tree.get("grpo", tree.get("ppo", {})).get("seed", 0),
        "hf_overrides": policy.get("hf_config_overrides") or {},
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        **policy["generation"]["vllm_kwargs"],
    }


def _executor(tree: Mapping[str, Any], vllm: Mapping[str, Any]) -> str:
    """The actor's own process, or worker processes of its node, unless an engine core is larger than a node. vLLM would
    choose Ray wherever it finds itself inside a placement group, which its CPU platform cannot."""
    ranks = EngineShape.of(vllm).core_ranks
    if ranks == 1:
        return "uni"
    return "ray" if ranks > tree["cluster"]["gpus_per_node"] else "mp"
