"""What model families call their tensors in Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names of a family's blocks. A layer's tensors are ``{root}.layers.{i}.{block}.{tensor}``."""

    root: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    feed_forward: str = "mlp"
    experts: str = "mlp"
    """The block that holds router, experts and shared experts."""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_experts: str = "shared_experts"
    mtp: bool = False
    """Whether multi-token-prediction layers follow the decoder's, as further layers."""

    def layer(self, index: int) -> str:
        return f"{self.root}.layers.{index}"


_STANDARD = CheckpointNames()
_QWEN_MOE = CheckpointNames(shared_experts="shared_expert")
FAMILIES = {
    "llama": _STANDARD,
    "qwen2": _STANDARD,
    "qwen3": _STANDARD,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "mixtral": CheckpointNames(experts="block_sparse_moe", expert_projections=("w1", "w3", "w2")),
    "deepseek_v3": CheckpointNames(mtp=True),
    "nemotron_h": CheckpointNames(
        root="backbone",
        embedding="embeddings",
        final_norm="norm_f",
        attention_norm="norm",
        feed_forward_norm="norm",
        attention="mixer",
        feed_forward="mixer",
        experts="mixer",
    ),
}
"""By ``model_type`` of ``config.json``."""


def names_of(model_type: str) -> CheckpointNames:
    """Raises ValueError for a family that is not known."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"Megatron source: no checkpoint names for model_type {model_type!r}; allowed: {known}")
    return FAMILIES[model_type]
