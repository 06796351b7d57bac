"""Models by name, each with the public configuration its shapes come from and what of it is assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .families import FAMILIES
from .tensors import ModelTensor


class ModelError(ValueError):
    """The model is no preset, its file cannot be read, or its architecture has no rule here."""


class UnknownArchitectureError(ModelError):
    """A readable configuration of an architecture without a rule of its own."""


@dataclass(frozen=True)
class Model:
    """A model to plan for: its configuration and, derived from it, its checkpoint's tensors."""

    name: str
    config: Mapping[str, Any]
    source: str
    assumed: tuple[str, ...] = ()
    """What is not public and was chosen, one sentence each; empty when all shapes are public."""
    given: tuple[ModelTensor, ...] = ()
    """Tensors of an architecture that has no rule in ``FAMILIES``."""

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        return self.given or tuple(FAMILIES[self.config["model_type"]](self.config))

    @property
    def layers(self) -> int:
        if self.given:
            return max((tensor.layer for tensor in self.given), default=0) + 1
        pattern = self.config.get("hybrid_override_pattern")
        return len(pattern) if pattern else self.config["num_hidden_layers"]

    @property
    def experts(self) -> int:
        if self.given:
            return max((tensor.expert for tensor in self.given), default=-1) + 1
        keys = ("num_experts", "n_routed_experts", "num_local_experts")
        return next((self.config[key] for key in keys if self.config.get(key)), 0)

    @property
    def nbytes(self) -> int:
        return sum(tensor.parameter.nbytes for tensor in self.tensors)


def load_model(name_or_path: str) -> Model:
    """A preset by its name, or the model that a ``config.json`` (or its folder) describes.

    Raises:
        UnknownArchitectureError: the configuration's ``model_type`` has no rule here.
        ModelError: no such preset and no such file, or not a configuration.
    """
    if name_or_path.lower() in MODELS:
        return MODELS[name_or_path.lower()]
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"--model: no preset and no file {name_or_path!r}; presets: {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"--model: {path} is not JSON: {error}") from error
    return model_from_config(path.parent.name or path.stem, config, str(path))


def model_from_config(name: str, config: Mapping[str, Any], source: str) -> Model:
    """The model of a configuration as found in a ``config.json``; multimodal models are planned without their tower."""
    if not isinstance(config, Mapping) or not config.get("model_type"):
        raise ModelError(f"--model: {source} has no model_type")
    notes: tuple[str, ...] = ()
    if isinstance(config.get("text_config"), Mapping):
        notes = ("only the language model is planned; the other towers of the multimodal model are left out",)
        config = {**config["text_config"], "model_type": config["text_config"].get("model_type", config["model_type"])}
    if config["model_type"] not in FAMILIES:
        raise UnknownArchitectureError(
            f"--model: {source}: no rule for model_type {config['model_type']!r}; rules exist for {', '.join(FAMILIES)}"
        )
    if "num_local_experts" in config:
        # transformers 5 writes Qwen3-MoE's number of experts under Mixtral's name.
        config = {"num_experts": config["num_local_experts"], **config}
    model = Model(name, config, source, notes)
    try:
        _ = model.tensors
    except KeyError as error:
        raise ModelError(f"--model: {source}: the configuration lacks {error.args[0]!r}") from error
    return model


def _public(name: str, repository: str, config: dict[str, Any], *assumed: str) -> Model:
    return Model(name, config, f"config.json of {repository}", assumed)


_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3_MOE = {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4,
              "num_experts": 128}  # fmt: skip
_QWEN_HYBRID = {"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "head_dim": 256, "num_experts": 512,
                "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
                "linear_conv_kernel_dim": 4, "full_attention_interval": 4}  # fmt: skip
_K3_LAYERS = 93

_MODELS = (
    _public("llama-3.2-1b", "meta-llama/Llama-3.2-1B", {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True}),
    _public("qwen3-0.6b", "Qwen/Qwen3-0.6B", _QWEN3 | {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
        "tie_word_embeddings": True}),
    _public("qwen3-4b", "Qwen/Qwen3-4B", _QWEN3 | {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728,
        "tie_word_embeddings": True}),
    _public("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", _QWEN3_MOE | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "moe_intermediate_size": 768}),
    _public("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", _QWEN3_MOE | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536}),
    _public("deepseek-v3", "deepseek-ai/DeepSeek-V3", {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        "trained and served in bf16, without the multi-token-prediction layer"),
    _public("qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B", _QWEN_HYBRID | {
        "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2,
        "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64},
        "the language model alone, without vision tower and multi-token prediction"),
    _public("qwen3.8-2.4t-a95b", "Qwen/Qwen3.8-2.4T-A95B (layers, experts and heads as quoted in public threads)",
        _QWEN_HYBRID | {
        "hidden_size": 8192, "num_hidden_layers": 92, "num_attention_heads": 64, "num_key_value_heads": 4,
        "moe_intermediate_size": 2048, "shared_expert_intermediate_size": 2048, "linear_num_value_heads": 128},
        "hidden size 8192 and expert width 2048 are assumed: with them the model has 2.42e12 parameters and 95e9 "
        "active ones, as its name says; multi-token prediction is left out"),
    _public("kimi-k3-2.8t", "moonshotai/Kimi-K3 (as quoted in public threads; weights named as vLLM loads them)", {
        "model_type": "kimi_k3", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": _K3_LAYERS,
        "num_attention_heads": 96, "intermediate_size": 18432, "moe_intermediate_size": 3072, "num_experts": 896,
        "num_shared_experts": 2, "first_k_dense_replace": 1, "routed_expert_hidden_size": 3584, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "mla_use_output_gate": True, "linear_attn_config": {
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, _K3_LAYERS, 4), _K3_LAYERS]}},
        "ranks of the latent attention, width of the one dense layer and heads of the delta attention are assumed",
        "bf16 masters are moved (5.6 TB), not the published 4-bit experts; attention residuals, vision tower and "
        "multi-token prediction are left out"),
    _public("nemotron-3-ultra", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16 (sizes as quoted in public threads)", {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 5120, "moe_intermediate_size": 5120,
        "moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10240, "n_routed_experts": 512,
        "mamba_num_heads": 256, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "hybrid_override_pattern": ("MEMEMEM*E" + "MEMEMEM*E" + "MEMEMEM*E") * 4},
        "the order of the 108 layers (48 Mamba, 48 expert, 12 attention), key-value heads, Mamba heads and the width "
        "of the shared expert are assumed; with them the model has 549e9 parameters and 55e9 active ones"),
)  # fmt: skip

MODELS: dict[str, Model] = {model.name: model for model in _MODELS}
"""Presets by name."""
