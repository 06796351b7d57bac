"""Feed-forward tensors: dense, experts in three storage forms, shared experts, and the router."""

from __future__ import annotations

from collections.abc import Sequence
from re import Match

import torch

from .fusion import Fused, columns, replicated, rows, stacked
from .layer_context import Composed, LayerContext, Rules


def _norm(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    return [(local, replicated(f"{layer.prefix}.{layer.names.feed_forward_norm}.{match['kind']}", local.shape[0]))]


def _dense(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    prefix = f"{layer.prefix}.{layer.names.feed_forward}"
    return _projection(layer, match, local, prefix, layer.config.ffn_hidden_size)


def _shared(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    prefix = f"{layer.prefix}.{layer.names.experts}.{layer.names.shared_experts}"
    return _projection(layer, match, local, prefix, layer.config.moe_shared_expert_intermediate_size)


def _projection(layer: LayerContext, match: Match[str], local: torch.Tensor, prefix: str, size: int) -> Composed:
    names = [f"{prefix}.{name}.{match['kind']}" for name in ("gate_proj", "up_proj", "down_proj")]
    return [(local, _linear(layer, match["fc"], match["kind"], names, size, local, expert=False))]


def _linear(
    layer: LayerContext, fc: str, kind: str, names: Sequence[str], size: int, local: torch.Tensor, *, expert: bool
) -> Fused:
    gate, up, down = names
    if fc == "2":
        return replicated(down, local.shape[0]) if kind == "bias" else columns(down, size, expert=expert)
    return stacked([gate, up], size, expert=expert) if layer.config.gated_linear_unit else rows(up, size, expert=expert)


def _expert_names(layer: LayerContext, local_index: int, kind: str) -> list[str]:
    number = layer.module.mlp.local_expert_indices[local_index]
    prefix = f"{layer.prefix}.{layer.names.experts}.experts.{number}"
    return [f"{prefix}.{name}.{kind}" for name in layer.names.expert_projections]


def _expert(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    names = _expert_names(layer, int(match["expert"]), match["kind"])
    size = layer.config.moe_ffn_hidden_size
    return [(local, _linear(layer, match["fc"], match["kind"], names, size, local, expert=True))]


def _grouped(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    """All local experts in one tensor, input dimension first: each expert is a transposed view of it."""
    count, hidden = len(layer.module.mlp.local_expert_indices), layer.config.hidden_size
    shape = (count, hidden, -1) if match["fc"] == "1" else (count, -1, hidden)
    size = layer.config.moe_ffn_hidden_size
    views = [expert.T for expert in local.view(shape)]
    return [
        (v, _linear(layer, match["fc"], "weight", _expert_names(layer, i, "weight"), size, v, expert=True))
        for i, v in enumerate(views)
    ]


def _router(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    tensor = "e_score_correction_bias" if match["tensor"] == "expert_bias" else match["tensor"]
    return [(local, replicated(f"{layer.prefix}.{layer.names.experts}.gate.{tensor}", local.shape[0]))]


def _shared_gate(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    name = f"{layer.prefix}.{layer.names.experts}.{layer.names.shared_experts}_gate.weight"
    return [(local, replicated(name, local.shape[0]))]


RULES: Rules = {
    r"(pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(?P<kind>weight|bias)": _norm,
    r"mlp\.linear_fc(?P<fc>[12])\.(?P<kind>weight|bias)": _dense,
    r"mlp\.shared_experts\.linear_fc(?P<fc>[12])\.(?P<kind>weight|bias)": _shared,
    r"mlp\.shared_experts\.gate_weight": _shared_gate,
    r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc(?P<fc>[12])\.(?P<kind>weight|bias)": _expert,
    r"mlp\.experts\.linear_fc(?P<fc>[12])\.(?P<kind>weight|bias)(?P<expert>\d+)": _expert,
    r"mlp\.experts\.weight(?P<fc>[12])": _grouped,
    r"mlp\.router\.(?P<tensor>weight|bias|expert_bias)": _router,
}
