"""Optimizer, learning-rate schedule and gradient clipping for sharded parameters."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

DEFAULT_OPTIMIZER = {"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-6, "weight_decay": 0.01}}


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: Mapping[str, Any] | None
) -> torch.optim.Optimizer:
    """``{name: dotted class name, kwargs}`` over the parameters that require gradients."""
    config = config or DEFAULT_OPTIMIZER
    trainable = [p for p in parameters if p.requires_grad]
    kwargs = dict(config.get("kwargs") or {})
    if "betas" in kwargs:
        kwargs["betas"] = tuple(kwargs["betas"])
    if len({_mesh_of(p) for p in trainable}) > 1:
        # A fused multi-tensor update cannot mix device meshes, and tensor parallelism leaves norms on a sub-mesh.
        kwargs.setdefault("foreach", False)
    return _imported(config["name"])(trainable, **kwargs)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> LRScheduler | None:
    """One ``{name, kwargs}``, or a list of them and ``{milestones: [steps]}``, at which the next one takes over."""
    if not config:
        return None
    entries = [config] if isinstance(config, Mapping) else list(config)
    milestones = [m for entry in entries for m in entry.get("milestones") or ()]
    stages = [_imported(e["name"])(optimizer, **(e.get("kwargs") or {})) for e in entries if "name" in e]
    if len(milestones) != len(stages) - 1:
        raise ValueError(
            f"policy.scheduler: {len(stages)} schedulers need {len(stages) - 1} milestones, got {milestones}; "
            "add an entry {milestones: [...]}"
        )
    return stages[0] if len(stages) == 1 else SequentialLR(optimizer, stages, milestones)


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> float:
    """Scales the gradients so that their global L2 norm is at most ``max_norm`` (None: only measures). Returns the norm
    before clipping. Every rank of the parameters' meshes must call it. Parameters may lie on different meshes; each
    element is counted once."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _global_norm(gradients)
    if max_norm is not None:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            _local(gradient).mul_(scale.to(_local(gradient).device))
    return float(norm)


def _global_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    by_layout: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(_sharding_of(gradient), []).append(_local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=_local(gradients[0]).device if gradients else "cpu")
    for (mesh, sharded_dims), locals_ in by_layout.items():
        squares = torch.stack([g.float().square().sum(dtype=torch.float64) for g in locals_]).sum()
        for mesh_dim in sharded_dims:
            dist.all_reduce(squares, group=mesh.get_group(mesh_dim))
        total = total + squares
    return total.sqrt().float()


def _sharding_of(tensor: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    if not isinstance(tensor, DTensor):
        return None, ()
    dims = tuple(i for i, p in enumerate(tensor.placements) if not isinstance(p, Replicate))
    return tensor.device_mesh, dims


def _mesh_of(tensor: torch.Tensor) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _imported(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {dotted!r}; write the full dotted name, such as torch.optim.AdamW") from error
