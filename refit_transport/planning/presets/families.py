"""Tensors of a model from its public configuration: one function per architecture, names as in its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .blocks import feed_forward, grouped_attention, latent_attention, routed_experts
from .tensors import COLUMNS, EMBEDDING, HEAD, ROWS, VOCABULARY, Cut, ModelTensor

Config = Mapping[str, Any]


def dense_tensors(config: Config) -> Iterator[ModelTensor]:
    """Llama, Qwen2 and Qwen3: grouped-query attention and a gated feed-forward network in every layer."""
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _two_norms(config, layer)
        yield from grouped_attention(config, layer, prefix + "self_attn.", qk_norm=_is(config, "qwen3"))
        yield from feed_forward(config, layer, prefix + "mlp.", config["intermediate_size"])
    yield from _ends(config)


def qwen_moe_tensors(config: Config) -> Iterator[ModelTensor]:
    """Qwen3-MoE: routed experts in every layer, no shared expert."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _two_norms(config, layer)
        yield from grouped_attention(config, layer, prefix + "self_attn.", qk_norm=True)
        yield ModelTensor(prefix + "mlp.gate.weight", (experts, hidden), layer=layer)
        yield from routed_experts(layer, prefix + "mlp.experts.", experts, hidden, config["moe_intermediate_size"])
    yield from _ends(config)


def deepseek_tensors(config: Config) -> Iterator[ModelTensor]:
    """DeepSeek-V3: latent attention, a few dense layers, then routed and shared experts."""
    hidden, experts, width = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _two_norms(config, layer)
        yield from latent_attention(config, layer, prefix + "self_attn.")
        if layer < config["first_k_dense_replace"]:
            yield from feed_forward(config, layer, prefix + "mlp.", config["intermediate_size"])
            continue
        yield ModelTensor(prefix + "mlp.gate.weight", (experts, hidden), layer=layer)
        yield ModelTensor(prefix + "mlp.gate.e_score_correction_bias", (experts,), layer=layer, dtype="float32")
        yield from routed_experts(layer, prefix + "mlp.experts.", experts, hidden, width)
        yield from feed_forward(config, layer, prefix + "mlp.shared_experts.", width * config["n_shared_experts"])
    yield from _ends(config)


def qwen_hybrid_tensors(config: Config) -> Iterator[ModelTensor]:
    """Qwen3.5-MoE and Qwen3.8: gated delta-net layers, full attention every fourth layer, experts in every layer."""
    hidden, experts, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    every = config.get("full_attention_interval", 4)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _two_norms(config, layer)
        if (layer + 1) % every:
            yield from _delta_net(config, layer, prefix + "linear_attn.")
        else:
            yield from grouped_attention(config, layer, prefix + "self_attn.", qk_norm=True, gated_query=True)
        yield ModelTensor(prefix + "mlp.gate.weight", (experts, hidden), layer=layer)
        yield from routed_experts(layer, prefix + "mlp.experts.", experts, hidden, width)
        yield from feed_forward(config, layer, prefix + "mlp.shared_expert.", config["shared_expert_intermediate_size"])
        yield ModelTensor(prefix + "mlp.shared_expert_gate.weight", (1, hidden), layer=layer)
    yield from _ends(config)


def nemotron_tensors(config: Config) -> Iterator[ModelTensor]:
    """Nemotron-H: one mixer per layer (``M`` Mamba-2, ``*`` attention, ``E`` experts, ``-`` dense), ungated experts."""
    hidden = config["hidden_size"]
    for layer, block in enumerate(config["hybrid_override_pattern"]):
        prefix = f"backbone.layers.{layer}."
        yield ModelTensor(prefix + "norm.weight", (hidden,), layer=layer)
        if block == "M":
            yield from _mamba(config, layer, prefix + "mixer.")
        elif block == "*":
            yield from grouped_attention(config, layer, prefix + "mixer.", qk_norm=False)
        elif block == "E":
            yield from _latent_experts(config, layer, prefix + "mixer.")
        else:
            yield from feed_forward(config, layer, prefix + "mixer.", config["intermediate_size"], gated=False)
    vocabulary = (config["vocab_size"], hidden)
    yield ModelTensor("backbone.embeddings.weight", vocabulary, VOCABULARY, EMBEDDING)
    yield ModelTensor("backbone.norm_f.weight", (hidden,), layer=HEAD)
    yield ModelTensor("lm_head.weight", vocabulary, VOCABULARY, HEAD)


def kimi_tensors(config: Config) -> Iterator[ModelTensor]:
    """Kimi Linear and Kimi K3: delta attention with latent attention every fourth layer, latent routed experts."""
    hidden, experts, width = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    inner = config.get("routed_expert_hidden_size") or hidden
    full = set(config["linear_attn_config"]["full_attn_layers"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _two_norms(config, layer)
        if layer + 1 in full:
            yield from latent_attention(config, layer, prefix + "self_attn.")
        else:
            yield from _delta_attention(config, layer, prefix + "self_attn.")
        moe = prefix + "block_sparse_moe."
        if layer < config["first_k_dense_replace"]:
            yield from feed_forward(config, layer, prefix + "mlp.", config["intermediate_size"])
            continue
        yield ModelTensor(moe + "gate.weight", (experts, hidden), layer=layer)
        yield ModelTensor(moe + "gate.e_score_correction_bias", (experts,), layer=layer, dtype="float32")
        if inner != hidden:
            yield ModelTensor(moe + "routed_expert_down_proj.weight", (inner, hidden), layer=layer)
            yield ModelTensor(moe + "routed_expert_up_proj.weight", (hidden, inner), layer=layer)
        yield from routed_experts(layer, moe + "experts.", experts, inner, width, names=("w1", "w3", "w2"))
        yield from feed_forward(config, layer, moe + "shared_experts.", width * config["num_shared_experts"])
    yield from _ends(config)


FAMILIES: dict[str, Callable[[Config], Iterator[ModelTensor]]] = {
    "llama": dense_tensors,
    "qwen2": dense_tensors,
    "qwen3": dense_tensors,
    "qwen3_moe": qwen_moe_tensors,
    "deepseek_v3": deepseek_tensors,
    "qwen3_5_moe": qwen_hybrid_tensors,
    "qwen3_5_moe_text": qwen_hybrid_tensors,
    "nemotron_h": nemotron_tensors,
    "kimi_linear": kimi_tensors,
    "kimi_k3": kimi_tensors,
}
"""By the ``model_type`` of a configuration."""


def _is(config: Config, model_type: str) -> bool:
    return str(config.get("model_type", "")).startswith(model_type)


def _two_norms(config: Config, layer: int) -> Iterator[ModelTensor]:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield ModelTensor(f"model.layers.{layer}.{norm}.weight", (config["hidden_size"],), layer=layer)


def _ends(config: Config) -> Iterator[ModelTensor]:
    shape = (config["vocab_size"], config["hidden_size"])
    yield ModelTensor("model.embed_tokens.weight", shape, VOCABULARY, EMBEDDING)
    yield ModelTensor("model.norm.weight", (config["hidden_size"],), layer=HEAD)
    if not config.get("tie_word_embeddings", False):
        yield ModelTensor("lm_head.weight", shape, VOCABULARY, HEAD)


def _delta_net(config: Config, layer: int, prefix: str) -> Iterator[ModelTensor]:
    hidden = config["hidden_size"]
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    bands = Cut(dim=0, parts=(keys, keys, values))
    yield ModelTensor(prefix + "in_proj_qkv.weight", (2 * keys + values, hidden), bands, layer)
    yield ModelTensor(prefix + "in_proj_z.weight", (values, hidden), ROWS, layer)
    yield ModelTensor(prefix + "in_proj_a.weight", (heads, hidden), ROWS, layer)
    yield ModelTensor(prefix + "in_proj_b.weight", (heads, hidden), ROWS, layer)
    kernel = config["linear_conv_kernel_dim"]
    yield ModelTensor(prefix + "conv1d.weight", (2 * keys + values, 1, kernel), bands, layer)
    yield ModelTensor(prefix + "A_log", (heads,), ROWS, layer)
    yield ModelTensor(prefix + "dt_bias", (heads,), ROWS, layer)
    yield ModelTensor(prefix + "norm.weight", (config["linear_value_head_dim"],), layer=layer)
    yield ModelTensor(prefix + "out_proj.weight", (hidden, values), COLUMNS, layer)


def _delta_attention(config: Config, layer: int, prefix: str) -> Iterator[ModelTensor]:
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, head_dim = linear["num_heads"], linear["head_dim"]
    inner = heads * head_dim
    for name in ("q", "k", "v"):
        yield ModelTensor(f"{prefix}{name}_proj.weight", (inner, hidden), ROWS, layer)
        yield ModelTensor(f"{prefix}{name}_conv1d.weight", (inner, 1, linear["short_conv_kernel_size"]), ROWS, layer)
    if linear.get("use_full_rank_gate"):
        yield ModelTensor(prefix + "g_proj.weight", (inner, hidden), ROWS, layer)
    else:
        yield ModelTensor(prefix + "g_a_proj.weight", (head_dim, hidden), layer=layer)
        yield ModelTensor(prefix + "g_b_proj.weight", (inner, head_dim), ROWS, layer)
    yield ModelTensor(prefix + "f_a_proj.weight", (head_dim, hidden), layer=layer)
    yield ModelTensor(prefix + "f_b_proj.weight", (inner, head_dim), ROWS, layer)
    yield ModelTensor(prefix + "b_proj.weight", (heads, hidden), ROWS, layer)
    yield ModelTensor(prefix + "A_log", (1, 1, heads, 1), Cut(dim=2), layer, dtype="float32")
    yield ModelTensor(prefix + "dt_bias", (inner,), ROWS, layer, dtype="float32")
    yield ModelTensor(prefix + "o_norm.weight", (head_dim,), layer=layer)
    yield ModelTensor(prefix + "o_proj.weight", (hidden, inner), COLUMNS, layer)


def _mamba(config: Config, layer: int, prefix: str) -> Iterator[ModelTensor]:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner, state = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    conv = Cut(dim=0, parts=(inner, state, state))
    bands = Cut(dim=0, parts=(inner, inner, state, state, heads))
    yield ModelTensor(prefix + "in_proj.weight", (2 * inner + 2 * state + heads, hidden), bands, layer)
    yield ModelTensor(prefix + "conv1d.weight", (inner + 2 * state, 1, config["conv_kernel"]), conv, layer)
    yield ModelTensor(prefix + "conv1d.bias", (inner + 2 * state,), conv, layer)
    for name in ("A_log", "D"):
        yield ModelTensor(prefix + name, (heads,), ROWS, layer, dtype="float32")
    yield ModelTensor(prefix + "dt_bias", (heads,), ROWS, layer)
    yield ModelTensor(prefix + "norm.weight", (inner,), ROWS, layer)
    yield ModelTensor(prefix + "out_proj.weight", (hidden, inner), COLUMNS, layer)


def _latent_experts(config: Config, layer: int, prefix: str) -> Iterator[ModelTensor]:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    latent = config.get("moe_latent_size") or hidden
    yield ModelTensor(prefix + "gate.weight", (experts, hidden), layer=layer)
    yield ModelTensor(prefix + "gate.e_score_correction_bias", (experts,), layer=layer, dtype="float32")
    if latent != hidden:
        yield ModelTensor(prefix + "fc1_latent_proj.weight", (latent, hidden), layer=layer)
        yield ModelTensor(prefix + "fc2_latent_proj.weight", (hidden, latent), layer=layer)
    width = config["moe_intermediate_size"]
    yield from routed_experts(layer, prefix + "experts.", experts, latent, width, names=("up_proj", "", "down_proj"))
    shared = config["moe_shared_expert_intermediate_size"]
    yield from feed_forward(config, layer, prefix + "shared_experts.", shared, gated=False)
