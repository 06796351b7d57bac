"""Blocks that several architectures share: attention, feed-forward networks, routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .tensors import COLUMNS, ROWS, ModelTensor, attention_cuts

Config = Mapping[str, Any]


def grouped_attention(
    config: Config, layer: int, prefix: str, *, qk_norm: bool, gated_query: bool = False
) -> Iterator[ModelTensor]:
    """Grouped-query attention; with ``gated_query`` the query projection carries an output gate of its own size."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    query_rows = heads * head_dim * (2 if gated_query else 1)
    rows = (query_rows, kv_heads * head_dim, kv_heads * head_dim)
    bias = config.get("attention_bias") or config.get("model_type") == "qwen2"
    for name, size, cut in zip("qkv", rows, attention_cuts(heads, kv_heads, query_rows, head_dim), strict=True):
        yield ModelTensor(f"{prefix}{name}_proj.weight", (size, hidden), cut, layer)
        if bias:
            yield ModelTensor(f"{prefix}{name}_proj.bias", (size,), cut, layer)
    yield ModelTensor(prefix + "o_proj.weight", (hidden, heads * head_dim), COLUMNS, layer)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ModelTensor(f"{prefix}{name}.weight", (head_dim,), layer=layer)


def latent_attention(config: Config, layer: int, prefix: str) -> Iterator[ModelTensor]:
    """Multi-head latent attention: low-rank projections that every rank holds, then per-head ones that are cut."""
    hidden, heads, kv_rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank = config.get("q_lora_rank")
    if q_rank:
        yield ModelTensor(prefix + "q_a_proj.weight", (q_rank, hidden), layer=layer)
        yield ModelTensor(prefix + "q_a_layernorm.weight", (q_rank,), layer=layer)
        yield ModelTensor(prefix + "q_b_proj.weight", (heads * (rope + nope), q_rank), ROWS, layer)
    else:
        yield ModelTensor(prefix + "q_proj.weight", (heads * (rope + nope), hidden), ROWS, layer)
    yield ModelTensor(prefix + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), layer=layer)
    yield ModelTensor(prefix + "kv_a_layernorm.weight", (kv_rank,), layer=layer)
    yield ModelTensor(prefix + "kv_b_proj.weight", (heads * (nope + value), kv_rank), ROWS, layer)
    yield ModelTensor(prefix + "o_proj.weight", (hidden, heads * value), COLUMNS, layer)
    if config.get("mla_use_output_gate"):
        yield ModelTensor(prefix + "g_proj.weight", (heads * value, hidden), ROWS, layer)


def feed_forward(config: Config, layer: int, prefix: str, width: int, *, gated: bool = True) -> Iterator[ModelTensor]:
    """A feed-forward network of ``width``; every tensor parallelism cuts gate and up by rows and down by columns."""
    hidden = config["hidden_size"]
    if gated:
        yield ModelTensor(prefix + "gate_proj.weight", (width, hidden), ROWS, layer)
    yield ModelTensor(prefix + "up_proj.weight", (width, hidden), ROWS, layer)
    yield ModelTensor(prefix + "down_proj.weight", (hidden, width), COLUMNS, layer)


def routed_experts(
    layer: int,
    prefix: str,
    experts: int,
    hidden: int,
    width: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[ModelTensor]:
    """Routed experts by their names of gate, up and down; an empty name is a projection that the model lacks."""
    gate, up, down = names
    for expert in range(experts):
        for name in filter(None, (gate, up)):
            yield ModelTensor(f"{prefix}{expert}.{name}.weight", (width, hidden), ROWS, layer, expert)
        yield ModelTensor(f"{prefix}{expert}.{down}.weight", (hidden, width), COLUMNS, layer, expert)
