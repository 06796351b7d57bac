"""Guesses how the tensors of an architecture without a rule are cut, from the names that most architectures share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from refit_transport.layout.layout import LogicalParameter

from .tensors import COLUMNS, EMBEDDING, HEAD, REPLICATED, ROWS, VOCABULARY, Cut, ModelTensor, attention_cuts

_LAYER = re.compile(r"\.(?:layers|blocks|h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROWS = {"gate_proj", "up_proj", "w1", "w3", "fc1", "q_b_proj", "kv_b_proj", "g_proj", "in_proj_z"}
_COLUMNS = {"down_proj", "w2", "fc2", "o_proj", "out_proj", "dense"}
_VOCABULARY = {"embed_tokens", "embeddings", "wte", "lm_head"}


def tensors_by_name(parameters: Iterable[LogicalParameter], config: Mapping[str, Any]) -> tuple[ModelTensor, ...]:
    """The tensors with the cut that their names suggest; what no name suggests is taken to be replicated."""
    return tuple(
        ModelTensor(p.name, p.shape, _cut(p, config), _layer(p.name), _number(_EXPERT, p.name, -1), p.dtype)
        for p in parameters
    )


def _cut(parameter: LogicalParameter, config: Mapping[str, Any]) -> Cut:
    module = parameter.name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
    bias = parameter.name.endswith(".bias") or len(parameter.shape) < 2
    if module in _VOCABULARY:
        return VOCABULARY
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if module in ("q_proj", "k_proj", "v_proj") and heads and not parameter.shape[0] % (kv_heads or heads):
        kv_heads = kv_heads or heads
        head_dim = config.get("head_dim") or config.get("hidden_size", heads) // heads
        rows = parameter.shape[0] if module == "q_proj" else heads * head_dim
        return attention_cuts(heads, kv_heads, rows, head_dim)["qkv".index(module[0])]
    if module in _ROWS:
        return ROWS
    return COLUMNS if module in _COLUMNS and not bias else REPLICATED


def _layer(name: str) -> int:
    found = _number(_LAYER, name, HEAD)
    return (
        EMBEDDING if found == HEAD and any(f".{word}." in f".{name}" for word in _VOCABULARY - {"lm_head"}) else found
    )


def _number(pattern: re.Pattern[str], name: str, default: int) -> int:
    found = pattern.search(name)
    return int(found.group(1)) if found else default
