"""What a model's `config.json` says about the sizes that parallel layouts have to divide. Reads JSON alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a decoder. Zero means that the model has no such thing."""

    model_type: str
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    """Width of dense feed-forward layers; zero in a model whose every layer has experts."""
    experts: int
    expert_intermediate: int
    megatron_obstacle: str = ""
    """What the Megatron trainer does not build of it, as ``megatron_obstacle`` says."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelFacts:
        """From the contents of a `config.json`; multimodal models keep the decoder's under ``text_config``."""
        decoder = {**config, **(config.get("text_config") or {})}
        experts = _first(decoder, "num_experts", "n_routed_experts", "num_local_experts")
        heads = _first(decoder, "num_attention_heads")
        dense = _first(decoder, "intermediate_size")
        return cls(
            model_type=str(config.get("model_type", "")),
            layers=_first(decoder, "num_hidden_layers"),
            heads=heads,
            kv_heads=_first(decoder, "num_key_value_heads") or heads,
            intermediate=dense if not experts or _has_dense_layers(decoder) else 0,
            experts=experts,
            expert_intermediate=(_first(decoder, "moe_intermediate_size") or dense) if experts else 0,
            megatron_obstacle=megatron_obstacle(config),
        )


def megatron_obstacle(config: Mapping[str, Any]) -> str:
    """The entry of a ``config.json`` that keeps a model of a family that is built from being built by Megatron-core;
    empty when there is none."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            return f"{key}: true"
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    fits = {"default": True}
    if config.get("model_type") == "deepseek_v3":
        both = bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim"))
        fits["yarn"] = both and rope.get("attention_factor") is None and rope.get("truncate", True)
    else:
        fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
        fits["llama3"] = all(rope.get(key) == value for key, value in fixed.items())
    if kind not in fits:
        return f"rope_type: {kind}"
    return "" if fits[kind] else f"rope_type: {kind} with parameters of its own"


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of rotary embeddings, by today's names and with a ``rope_type``; older configurations have ``rope_scaling``."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return {"rope_type": found.get("type") or "default", "rope_theta": config.get("rope_theta") or 10000.0} | found


def read_model_config(model_name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The configuration of a directory, a `config.json`, a built-in tiny model or a preset; None when it is not on this
    machine, so that its sizes cannot be checked here. Raises ValueError for a file that is not JSON."""
    path = Path(model_name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        from refit_transport.config.tiny_models import TINY_MODELS
        from refit_transport.planning.presets.models import MODELS

        preset = MODELS.get(model_name.lower())
        found = TINY_MODELS.get(model_name) or (preset and preset.config)
        return {**found, **(overrides or {})} if found else None
    try:
        return {**json.loads(path.read_text()), **(overrides or {})}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a model configuration: {error}") from None


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """MoE models of these families put experts into every layer unless one of these says otherwise."""
    return bool(
        config.get("mlp_only_layers")
        or _first(config, "first_k_dense_replace")
        or _first(config, "decoder_sparse_step") > 1
        or config.get("hybrid_override_pattern")
    )
