"""Mamba tensors: a mixer's projections are several components, each cut by itself."""

from __future__ import annotations

from re import Match

import torch

from .fusion import Fused, Part, columns, replicated, rows
from .layer_context import Composed, LayerContext, Rules


def _components(name: str, sizes: tuple[int, ...]) -> Fused:
    """One checkpoint tensor whose row ranges of ``sizes`` are cut one by one."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return Fused(0, tuple(Part(name, start, size) for start, size in zip(starts, sizes, strict=True)), each=True)


def _input(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    mixer = layer.module.mixer
    inner, state = mixer.d_inner, mixer.ngroups * mixer.d_state
    return [(local, _components(f"{layer.prefix}.mixer.in_proj.weight", (inner, inner, state, state, mixer.nheads)))]


def _convolution(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    mixer = layer.module.mixer
    state = mixer.ngroups * mixer.d_state
    return [(local, _components(f"{layer.prefix}.mixer.conv1d.{match['kind']}", (mixer.d_inner, state, state)))]


def _per_head(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    mixer = layer.module.mixer
    size = mixer.d_inner if match["name"] == "D" and mixer.D_has_hdim else mixer.nheads
    return [(local, rows(f"{layer.prefix}.mixer.{match['name']}", size))]


def _gated_norm(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    return [(local, rows(f"{layer.prefix}.mixer.norm.weight", layer.module.mixer.d_inner))]


def _output(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    return [(local, columns(f"{layer.prefix}.mixer.out_proj.weight", layer.module.mixer.d_inner))]


def _norm(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    return [(local, replicated(f"{layer.prefix}.{layer.names.attention_norm}.{match['kind']}", local.shape[0]))]


RULES: Rules = {
    r"(norm\.|mixer\.in_proj\.layer_norm_)(?P<kind>weight|bias)": _norm,
    r"mixer\.in_proj\.weight": _input,
    r"mixer\.conv1d[._](?P<kind>weight|bias)": _convolution,
    r"mixer\.(?P<name>A_log|D|dt_bias)": _per_head,
    r"mixer\.norm\.weight": _gated_norm,
    r"mixer\.out_proj\.weight": _output,
}
