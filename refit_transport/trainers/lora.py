"""Finds the LoRA adapters of a model and merges them into the weights that leave it.

Three structures are known: peft's tuner layers, Linear modules with ``lora_A`` and ``lora_B`` of their own, and
``torch.nn.utils.parametrize`` on a weight. Anything else that looks like an adapter is an error that names it, because
without it the base policy would be sent and nobody told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from refit_transport.layout.region import Region

_ADAPTER_KEY = re.compile(
    r"(^|\.)(lora_|base_layer\.|parametrizations\.|ia3_|oft_|vera_|modules_to_save\.|original_module\.)"
)


@dataclass(frozen=True, slots=True)
class LowRank:
    """``scale * B @ A`` is added to a weight [out, in]; ``a`` is [r, in] and ``b`` [out, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """``names``: state-dict key -> name of the same tensor in a model without adapters; adapter tensors are left out.
    ``low_rank``: by the latter name, what is to be added to the tensor."""

    names: Mapping[str, str]
    low_rank: Mapping[str, tuple[LowRank, ...]]


def read_adapters(model: nn.Module, keys: Iterable[str]) -> AdaptedModel:
    """Reads the adapters that are active now. ``keys`` are those of ``model``'s state dict. Raises ValueError that
    names the tensors or the module of an adapter whose structure is not known."""
    renamed: dict[str, str | None] = {}
    low_rank: dict[str, tuple[LowRank, ...]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
            _read_peft(prefix, module, renamed, low_rank)
        elif isinstance(getattr(module, "lora_A", None), nn.Linear):
            _read_linear(prefix, module, renamed, low_rank)
        elif isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            _read_whole_copy(prefix, module, renamed)
        elif isinstance(getattr(module, "parametrizations", None), nn.ModuleDict):
            _read_parametrized(prefix, module, renamed, low_rank)
    keys = list(keys)
    unknown = [key for key in keys if renamed.get(key, key) is not None and _ADAPTER_KEY.search(renamed.get(key, key))]
    if unknown:
        raise ValueError(
            f"adapter tensors of unknown structure: {', '.join(unknown[:8])} ({len(unknown)} in all); known are LoRA "
            "on Linear by peft, by modules lora_A and lora_B, and by torch.nn.utils.parametrize; merge others yourself"
        )
    names = {key: target for key in keys if (target := renamed.get(key, key)) is not None}
    return AdaptedModel({key: name.removeprefix("base_model.model.") for key, name in names.items()}, low_rank)


def merge(
    out: torch.Tensor, base: torch.Tensor, boxes: Sequence[tuple[Region, Region]], adapters: Sequence[LowRank]
) -> None:
    """Writes ``base`` plus the adapters to ``out``, both a rank's local tensor. The sum is float32 and cast once.

    ``boxes`` pair each region of the global weight with the region of the local tensor that stores it. The adapters
    must have full matrices; see ``gather``."""
    total = base.to(torch.float32, copy=True)
    for held, local in boxes:
        part = total[local.slices()]
        for adapter in adapters:
            rows, columns = held.slices()
            part.addmm_(adapter.b[rows].float(), adapter.a[:, columns].float(), alpha=adapter.scale)
    out.copy_(total)


def gather(adapters: Sequence[LowRank]) -> tuple[LowRank, ...]:
    """The same adapters with full matrices. Every rank of the matrices' meshes must call it, in the same order."""
    return tuple(LowRank(_full(adapter.a), _full(adapter.b), adapter.scale) for adapter in adapters)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _read_peft(prefix: str, module: Any, renamed: dict[str, str | None], low_rank: dict[str, Any]) -> None:
    base = module.base_layer
    name = prefix.rstrip(".")
    if not isinstance(base, nn.Linear):
        raise ValueError(
            f"adapter on {name}: LoRA on {type(base).__name__} cannot be merged on the way out, only on Linear"
        )
    if len(module.lora_magnitude_vector) or any(variant is not None for variant in module.lora_variant.values()):
        raise ValueError(
            f"adapter on {name}: LoRA variants such as DoRA cannot be merged on the way out, only plain LoRA"
        )
    if any(getattr(module.lora_B[adapter], "bias", None) is not None for adapter in module.lora_B):
        raise ValueError(f"adapter on {name}: lora_bias cannot be merged on the way out; train without it")
    for key in base.state_dict():
        renamed[f"{prefix}base_layer.{key}"] = f"{prefix}{key}"
    for side in ("lora_A", "lora_B"):
        for adapter in getattr(module, side):
            renamed[f"{prefix}{side}.{adapter}.weight"] = None
    active = () if module.disable_adapters else module.active_adapters
    merged = set(module.merged_adapters)
    parts = [
        _checked(name, module.lora_A[a].weight, module.lora_B[a].weight, module.scaling[a], base.weight)
        for a in active
        if a in module.lora_A and a not in merged
    ]
    if parts:
        low_rank[f"{prefix}weight".removeprefix("base_model.model.")] = tuple(parts)


def _read_whole_copy(prefix: str, module: Any, renamed: dict[str, str | None]) -> None:
    """peft's ``modules_to_save``: a trained copy stands in for the original module."""
    copies = {a: (f"modules_to_save.{a}.", m) for a, m in module.modules_to_save.items()}
    active = () if module.disable_adapters else module.active_adapters
    live, _ = next((copies[a] for a in active if a in copies), ("original_module.", None))
    for inside, part in (("original_module.", module.original_module), *copies.values()):
        for key in part.state_dict():
            renamed[f"{prefix}{inside}{key}"] = f"{prefix}{key}" if inside == live else None


def _read_linear(prefix: str, module: Any, renamed: dict[str, str | None], low_rank: dict[str, Any]) -> None:
    name = prefix.rstrip(".")
    scale = next((getattr(module, key) for key in ("scale", "scaling") if hasattr(module, key)), None)
    if not isinstance(scale, (int, float)) or not isinstance(getattr(module, "weight", None), torch.Tensor):
        raise ValueError(
            f"adapter on {name}: {type(module).__name__} has lora_A but no weight, or no number scale or scaling"
        )
    if module.lora_A.bias is not None or module.lora_B.bias is not None:
        raise ValueError(f"adapter on {name}: a bias in lora_A or lora_B cannot be merged on the way out")
    renamed |= {f"{prefix}lora_A.weight": None, f"{prefix}lora_B.weight": None}
    low_rank[f"{prefix}weight"] = (_checked(name, module.lora_A.weight, module.lora_B.weight, scale, module.weight),)


def _read_parametrized(prefix: str, module: Any, renamed: dict[str, str | None], low_rank: dict[str, Any]) -> None:
    for tensor, steps in module.parametrizations.items():
        name, inside = f"{prefix}{tensor}", f"{prefix}parametrizations.{tensor}"
        renamed[f"{inside}.original"] = name
        parts = []
        for number, step in enumerate(steps):
            a, b = getattr(step, "lora_A", None), getattr(step, "lora_B", None)
            scale = getattr(step, "scaling", getattr(step, "scale", None))
            if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and isinstance(scale, (int, float))):
                raise ValueError(
                    f"parametrization {inside}.{number} ({type(step).__name__}) is not LoRA with tensors lora_A and "
                    "lora_B and a number scaling, so its weight cannot be sent; remove it, or merge it yourself"
                )
            renamed |= {f"{inside}.{number}.lora_A": None, f"{inside}.{number}.lora_B": None}
            parts.append(_checked(name, a, b, scale, steps.original))
        low_rank[name] = tuple(parts)


def _checked(name: str, a: torch.Tensor, b: torch.Tensor, scale: float, weight: torch.Tensor) -> LowRank:
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != tuple(weight.shape):
        raise ValueError(
            f"adapter on {name}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} do not give a matrix of the "
            f"weight's shape {tuple(weight.shape)}; expected [r, in] and [out, r]"
        )
    return LowRank(a, b, float(scale))
