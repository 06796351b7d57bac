"""Attention tensors: grouped query, key and value rows, and multi-head latent attention."""

from __future__ import annotations

from re import Match

import torch

from .fusion import Fused, Part, columns, replicated, rows
from .layer_context import Composed, LayerContext, Rules


def _query_key_value(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    """Rows go by key-value group: the queries of the group, its key, its value. A rank may hold a part of a group."""
    config = layer.config
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    query, key, value = (layer.attention(f"{which}_proj.{match['kind']}") for which in "qkv")
    queries = heads // groups * size
    parts: list[Part] = []
    for group in range(groups):
        parts += [
            Part(query, group * queries, queries),
            Part(key, group * size, size),
            Part(value, group * size, size),
        ]
    return [(local, Fused(0, tuple(parts)))]


def _output(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    name = layer.attention(f"o_proj.{match['kind']}")
    if match["kind"] == "bias":
        return [(local, replicated(name, local.shape[0]))]
    config = layer.config
    width = config.v_head_dim if config.multi_latent_attention else config.kv_channels
    return [(local, columns(name, config.num_attention_heads * width))]


def _input_norm(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    return [(local, replicated(f"{layer.prefix}.{layer.names.attention_norm}.{match['kind']}", local.shape[0]))]


def _head_norm(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    latent = layer.config.multi_latent_attention
    name = f"{match['which']}_a_layernorm" if latent else f"{match['which']}_norm"
    return [(local, replicated(layer.attention(f"{name}.weight"), local.shape[0]))]


def _latent(layer: LayerContext, match: Match[str], local: torch.Tensor) -> Composed:
    """Projections of latent attention; its rotary dimensions are interleaved in Megatron as in the checkpoint."""
    config = layer.config
    heads, rope = config.num_attention_heads, config.qk_pos_emb_head_dim
    name, size = {
        "q": ("q_proj", heads * (config.qk_head_dim + rope)),
        "q_down": ("q_a_proj", config.q_lora_rank),
        "q_up": ("q_b_proj", heads * (config.qk_head_dim + rope)),
        "kv_down": ("kv_a_proj_with_mqa", config.kv_lora_rank + rope),
        "kv_up": ("kv_b_proj", heads * (config.qk_head_dim + config.v_head_dim)),
    }[match["which"]]
    return [(local, rows(layer.attention(f"{name}.{match['kind']}"), size))]


RULES: Rules = {
    r"self_attention\.linear_qkv\.(?P<kind>weight|bias)": _query_key_value,
    r"self_attention\.linear_proj\.(?P<kind>weight|bias)": _output,
    r"(input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)(?P<kind>weight|bias)": _input_norm,
    r"self_attention\.(?P<which>q|k|kv)_layernorm\.weight": _head_norm,
    r"self_attention\.linear_(?P<which>q|kv)_up_proj\.layer_norm_weight": _head_norm,
    r"self_attention\.linear_(?P<which>q|(q|kv)_(down|up))_proj\.(?P<kind>weight|bias)": _latent,
}
