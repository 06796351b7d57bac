"""LoRA for the trained model: low-rank adapters beside its linear layers, and nothing else trained."""

from __future__ import annotations

import fnmatch
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from refit_transport.trainers.dtensor_load import fill


class LoraLinear(nn.Linear):
    """``x W^T + b + scale * x A^T B^T``. ``B`` starts at zero, so the model starts unchanged."""

    def __init__(self, linear: nn.Linear, dim: int, alpha: float, seed: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / dim
        self._seed = seed
        options = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(linear.in_features, dim, **options)
        self.lora_B = nn.Linear(dim, linear.out_features, **options)
        self.reset_new_parameters()

    def reset_new_parameters(self) -> None:
        """The same values however the model is sharded; called again once it is."""
        if self.lora_A.weight.is_meta:
            return
        generator = torch.Generator().manual_seed(self._seed)
        full = torch.empty(self.lora_A.weight.shape)
        fill(self.lora_A.weight, nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x)) * self.scale


def add_adapters(model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Freezes ``model`` and puts adapters on its linear layers, in place.

    ``config`` is ``lora_cfg``: ``target_modules`` are patterns for the dotted name of a module or its last part; with
    ``match_all_linear`` (and no patterns) all linear layers but the output head are taken. ``dim`` is the rank, and the
    adapters count ``alpha / dim``. Raises ValueError if nothing matches.
    """
    patterns = tuple(config.get("target_modules") or ())
    if not patterns and config.get("match_all_linear", True):
        patterns = ("*",)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chosen = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and _matches(name, patterns)
    ]
    if not chosen:
        raise ValueError(f"lora_cfg.target_modules: {list(patterns)} match no linear layer of {type(model).__name__}")
    model.requires_grad_(False)
    for name in chosen:
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        seed = zlib.crc32(name.encode())
        adapted = LoraLinear(linear, int(config.get("dim", 8)), float(config.get("alpha", 32)), seed)
        setattr(model.get_submodule(parent), child, adapted)
    return model


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name.rpartition(".")[2], p) for p in patterns)
