"""What does not work together, as one table. Validation reads it, and pages of the documentation are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from refit_transport.config.key import DOCUMENT
from refit_transport.config.pipeline_layout import stages_of
from refit_transport.config.setup import Setup
from refit_transport.config.violation import Violation

GENERATION = "policy.generation"
MEGATRON = "policy.megatron_cfg"
MEGATRON_TYPES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3")
"""By ``model_type``: what the Megatron trainer builds."""
PREDICTING_TYPES = ("deepseek_v3",)
"""Of these, families whose checkpoints have multi-token-prediction layers."""
ENGINE_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
)
"""Arguments of vLLM that decide how many ranks an engine has."""
REFIT_ARGUMENTS = ("weight_transfer_config", "worker_extension_cls")
"""Arguments of vLLM by which its workers take part in refits."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A combination that is refused before anything starts: ``key`` is what to change, to ``allowed``."""

    slug: str
    combination: str
    why: str
    key: str
    allowed: str
    applies: Callable[[Setup], bool]
    only_to_run: bool = False
    """It can be planned and validated all the same."""

    @property
    def anchor(self) -> str:
        return f"{DOCUMENT}#{self.slug}"


@dataclass(frozen=True, slots=True)
class Family:
    """A model family whose checkpoint names are known to the classification and covered by its tests."""

    name: str
    model_types: tuple[str, ...]
    feed_forward: str
    """What takes the reshard path with scope ``ffn``."""
    expert_model_on_cpu: bool = True
    """Whether vLLM's CPU platform has a kernel for its experts."""
    no_engine: str = ""
    """Why its tests have no running engine, and what they have instead."""


FAMILIES = (
    Family("Llama", ("llama",), "gate, up, down"),
    Family("Qwen3", ("qwen2", "qwen3"), "gate, up, down"),
    Family("Qwen3-MoE", ("qwen2_moe", "qwen3_moe"), "experts, shared expert"),
    Family("Qwen3-Next", ("qwen3_next",), "experts, shared expert"),
    Family("DeepSeek-V3", ("deepseek_v3",), "dense layers, experts, shared experts; MTP layers are broadcast"),
    Family("Mixtral", ("mixtral",), "experts (w1, w2, w3)"),
    Family("gpt-oss", ("gpt_oss",), "fused experts; biases and scales are broadcast"),
    Family("NemotronH", ("nemotron_h",), "up, down; experts, shared experts", expert_model_on_cpu=False),
    Family("Idefics3", ("idefics3",), "gate, up, down of the decoder; the vision tower is broadcast"),
    Family(
        "Qwen2.5-VL",
        ("qwen2_5_vl",),
        "gate, up, down of the decoder; the vision tower is broadcast",
        no_engine="vLLM imports torchvision for it, which the CPU environment leaves out; its model, loaded with a "
        "stand-in for that import, is refitted and compared tensor by tensor",
    ),
)


def _wire(setup: Setup) -> str:
    return setup.get(f"{GENERATION}.refit_cfg.{setup.transport}.wire") or "auto"


def _option(setup: Setup, name: str) -> Any:
    return setup.get(f"{GENERATION}.refit_cfg.{setup.transport}.{name}")


def _has_experts_without_cpu_kernel(setup: Setup) -> bool:
    model = setup.model
    lacking = {kind for family in FAMILIES if not family.expert_model_on_cpu for kind in family.model_types}
    return (
        setup.get("cluster.device") == "cpu" and model is not None and model.experts > 0 and model.model_type in lacking
    )


UNSUPPORTED = (
    Unsupported(
        "colocated-generation",
        "colocated generation with any transport",
        "weights move between ranks that train and ranks that generate; colocated ranks would share GPUs",
        f"{GENERATION}.colocated.enabled",
        "false: transports move weights between separate ranks, nccl_reshard and gather_broadcast alike",
        lambda s: s.colocated,
    ),
    Unsupported(
        "two-trainers",
        "both trainers enabled",
        "a policy has one trainer",
        "policy.dtensor_cfg.enabled",
        "false, since policy.megatron_cfg.enabled is true",
        lambda s: s.get("policy.dtensor_cfg.enabled") and s.get("policy.megatron_cfg.enabled"),
    ),
    Unsupported(
        "no-trainer",
        "no trainer enabled",
        "a policy has one trainer",
        "policy.dtensor_cfg.enabled",
        "true, or policy.megatron_cfg.enabled: true",
        lambda s: not s.get("policy.dtensor_cfg.enabled") and not s.get("policy.megatron_cfg.enabled"),
    ),
    Unsupported(
        "megatron-model",
        "training a family that the Megatron trainer does not build",
        "its layouts are planned, and a trainer of one's own can send it",
        "policy.megatron_cfg.enabled",
        f"false for this model; the Megatron trainer builds {', '.join(MEGATRON_TYPES)}",
        lambda s: s.trainer == "megatron" and s.model is not None and s.model.model_type not in MEGATRON_TYPES,
        only_to_run=True,
    ),
    Unsupported(
        "megatron-model-options",
        "Megatron trainer for a model with `attention_bias`, `mlp_bias` or `use_sliding_window`, or whose rotary "
        "embeddings are scaled otherwise than in Llama 3.1 or, for DeepSeek-V3, by YaRN",
        "Megatron-core has no such layer, or none with the checkpoint's numbers",
        "policy.megatron_cfg.enabled",
        "false for this model",
        lambda s: s.trainer == "megatron" and s.model is not None and s.model.megatron_obstacle != "",
        only_to_run=True,
    ),
    Unsupported(
        "megatron-prediction-layers",
        "training prediction layers of a family whose checkpoints have none",
        "they would have no name in the checkpoint",
        f"{MEGATRON}.mtp_num_layers",
        f"0 for this model; prediction layers are known of {', '.join(PREDICTING_TYPES)}",
        lambda s: (
            s.trainer == "megatron"
            and s.get(f"{MEGATRON}.mtp_num_layers") > 0
            and s.model is not None
            and s.model.model_type not in PREDICTING_TYPES
        ),
        only_to_run=True,
    ),
    Unsupported(
        "megatron-prediction-stage",
        "prediction layers on a pipeline stage before the last",
        "they read the last stage's hidden states and write its logits",
        f"{MEGATRON}.pipeline_model_parallel_layout",
        "a layout whose m are all on the last stage",
        lambda s: (
            s.trainer == "megatron"
            and any("m" in stage for stage in stages_of(s.get(f"{MEGATRON}.pipeline_model_parallel_layout") or "")[:-1])
        ),
        only_to_run=True,
    ),
    Unsupported(
        "megatron-float16",
        "Megatron trainer in `float16`",
        "steps that a loss scale skips are not part of the training loop",
        "policy.precision",
        "bfloat16 or float32",
        lambda s: s.trainer == "megatron" and s.get("policy.precision") == "float16",
        only_to_run=True,
    ),
    Unsupported(
        "megatron-latent-attention-on-cpu",
        "training DeepSeek-V3 with the Megatron trainer on CPU",
        "latent attention needs TransformerEngine, which runs on GPUs",
        "cluster.device",
        "cuda for this model",
        lambda s: (
            s.trainer == "megatron"
            and s.get("cluster.device") == "cpu"
            and s.model is not None
            and s.model.model_type == "deepseek_v3"
        ),
        only_to_run=True,
    ),
    Unsupported(
        "megatron-experts-without-sequence-parallelism",
        "Megatron trainer with experts and tensor parallelism, without sequence parallelism",
        "Megatron-core refuses to train so",
        f"{MEGATRON}.sequence_parallel",
        "true",
        lambda s: (
            s.trainer == "megatron"
            and s.tensor_parallel > 1
            and s.model is not None
            and s.model.experts > 0
            and not s.get(f"{MEGATRON}.sequence_parallel")
        ),
        only_to_run=True,
    ),
    Unsupported(
        "megatron-chunks-of-one-stage",
        "Megatron trainer with a virtual pipeline of one stage",
        "chunks interleave the stages of a pipeline",
        f"{MEGATRON}.virtual_pipeline_model_parallel_size",
        f"null with {MEGATRON}.pipeline_model_parallel_size 1",
        lambda s: (
            s.trainer == "megatron"
            and s.get(f"{MEGATRON}.pipeline_model_parallel_size") == 1
            and (s.get(f"{MEGATRON}.virtual_pipeline_model_parallel_size") or 1) > 1
        ),
    ),
    Unsupported(
        "nccl-on-cpu",
        "wire `nccl` or `nccl_m2n` with `cluster.device: cpu`",
        "NCCL moves GPU memory",
        f"{GENERATION}.refit_cfg.<transport>.wire",
        "auto, tcp or gloo on CPU",
        lambda s: s.get("cluster.device") == "cpu" and _wire(s) in ("nccl", "nccl_m2n"),
    ),
    Unsupported(
        "segment-domains",
        "`domains: segment` without `cluster.segment_size`",
        "a segment is so many nodes",
        f"{GENERATION}.refit_cfg.<transport>.domains",
        "auto, host or rank; or set cluster.segment_size",
        lambda s: _option(s, "domains") == "segment" and s.get("cluster.segment_size") is None,
    ),
    Unsupported(
        "experts-without-cpu-kernel",
        "NemotronH with experts on CPU",
        "vLLM has non-gated expert kernels for GPUs only",
        "cluster.device",
        "cuda for this model",
        _has_experts_without_cpu_kernel,
    ),
    Unsupported(
        "engine-sizes-in-vllm-kwargs",
        "parallel sizes of the engine among `vllm_kwargs`",
        "they decide how many ranks the engine takes, which is placed and numbered before it starts",
        f"{GENERATION}.vllm_kwargs",
        f"no {', '.join(ENGINE_SIZES)}: set {GENERATION}.vllm_cfg; an expert-parallel size beyond the tensor-parallel "
        "one is data parallelism",
        lambda s: any(name in (s.get(f"{GENERATION}.vllm_kwargs") or {}) for name in ENGINE_SIZES),
    ),
    Unsupported(
        "refit-in-vllm-kwargs",
        "a weight-transfer engine or worker extension of one's own among `vllm_kwargs`",
        "refits go through this project's",
        f"{GENERATION}.vllm_kwargs",
        f"no {', '.join(REFIT_ARGUMENTS)}",
        lambda s: any(name in (s.get(f"{GENERATION}.vllm_kwargs") or {}) for name in REFIT_ARGUMENTS),
    ),
    Unsupported(
        "expert-parallel-size",
        "DTensor trainer whose expert-parallel size is above 1 and no multiple of the tensor-parallel size",
        "an expert group is made of whole tensor-parallel groups",
        "policy.dtensor_cfg.expert_parallel_size",
        "1, or a multiple of policy.dtensor_cfg.tensor_parallel_size",
        lambda s: (
            s.trainer == "dtensor"
            and s.get("policy.dtensor_cfg.expert_parallel_size") > 1
            and s.get("policy.dtensor_cfg.expert_parallel_size") % s.tensor_parallel
        ),
    ),
    Unsupported(
        "tensor-parallel-plan",
        "DTensor trainer with tensor parallelism for NemotronH",
        "transformers has no tensor-parallel plan for it",
        "policy.dtensor_cfg.tensor_parallel_size",
        "1 for this model",
        lambda s: (
            s.trainer == "dtensor"
            and s.tensor_parallel > 1
            and s.model is not None
            and s.model.model_type == "nemotron_h"
        ),
    ),
    Unsupported(
        "lora-with-tensor-parallel",
        "LoRA with tensor parallelism",
        "tensor-parallel plans know no adapters",
        "policy.dtensor_cfg.lora_cfg.enabled",
        "false with policy.dtensor_cfg.tensor_parallel_size above 1",
        lambda s: s.trainer == "dtensor" and s.tensor_parallel > 1 and s.get("policy.dtensor_cfg.lora_cfg.enabled"),
    ),
    Unsupported(
        "lora-with-megatron",
        "LoRA with the Megatron trainer",
        "its layers have no adapters",
        "policy.dtensor_cfg.lora_cfg.enabled",
        "false with policy.megatron_cfg.enabled",
        lambda s: s.trainer == "megatron" and s.get("policy.dtensor_cfg.lora_cfg.enabled"),
    ),
)


def unsupported_rules(setup: Setup, to_run: bool = False) -> Iterator[Violation]:
    """Every row of the table that ``setup`` falls under, or only those that forbid to run it."""
    for row in UNSUPPORTED:
        if row.only_to_run == to_run and row.applies(setup):
            key = row.key.replace("<transport>", setup.transport)
            yield Violation(key, setup.get(key), row.allowed, row.anchor)


def refused_table() -> str:
    """Markdown: every row, with the anchor that violations name."""
    lines = ["| refused | why | set |", "|---|---|---|"]
    for row in UNSUPPORTED:
        lines.append(f'| <a id="{row.slug}"></a>{row.combination} | {row.why} | `{row.key}`: {row.allowed} |')
    return "\n".join(lines)
