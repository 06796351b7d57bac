"""This rank's side of M2N's calls: where members are stacked, and what is copied before and after each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from refit_transport.layout.region import Region
from refit_transport.planning.m2n import Geometry, SideMesh, Stack, sink_layout
from refit_transport.planning.plan import TransferGroup
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import Copies, Target

from .base import WireStats
from .m2n_counts import ParameterCounts


@dataclass(slots=True)
class BoundStack:
    """One call, ready to be made again and again."""

    geometry: Geometry
    names: tuple[str, ...]
    counts: WireStats
    """What the call moves on this rank."""
    source: torch.Tensor | None = None
    """What this rank gives: stacked members, or the live tensor of a single one. None without a part."""
    sink: torch.Tensor | None = None
    """Where this rank receives."""
    pack: Copies = field(default_factory=Copies)
    unpack: Copies = field(default_factory=Copies)

    @property
    def members(self) -> int:
        return len(self.names)


def bind_stacks(
    binding: Binding, stacks: Sequence[Stack], place: int, pool: torch.Tensor | None, counts: ParameterCounts
) -> tuple[BoundStack, ...]:
    """Views and copies of every stack for the rank at ``place`` of M2N's communicator.

    ``pool`` is uint8 memory for the largest stack, which all stacks share: they run one after the other, and a rank has
    one side of each. ``counts`` are those of the whole program. Raises ValueError for a tensor that is not as planned.
    """
    groups = {member: group for group in binding.plan.groups for member in group.members}
    return tuple(_bound(binding, stack, groups, place, pool, counts) for stack in stacks)


def _bound(
    binding: Binding,
    stack: Stack,
    groups: dict[int, TransferGroup],
    place: int,
    pool: torch.Tensor | None,
    counts: ParameterCounts,
) -> BoundStack:
    geometry, parameters = stack.geometry, [binding.plan.parameters[member] for member in stack.members]
    bound = BoundStack(geometry, tuple(parameter.name for parameter in parameters), counts.of(stack.members))
    if place in geometry.source.ranks:
        holdings = binding.source.holdings()
        views = [_checked(binding.source.view, p.name, holdings[p.name][0], p.dtype) for p in parameters]
        bound.source, slots = _stacked(geometry, geometry.source, views, views[0].shape, pool)
        for slot, view in zip(slots, views, strict=bool(slots)):
            bound.pack.add(slot, view)
    if place in geometry.sink.ranks:
        targets: list[Target] = []
        for member, parameter in zip(stack.members, parameters, strict=True):
            (region,) = sink_layout(groups[member]).regions_of(binding.rank)
            give = partial(_checked, binding.sink.view, parameter.name, region, groups[member].dst_dtype)
            targets.append(give if parameter.name in binding.sink.transient else give())
        bound.sink, slots = _stacked(geometry, geometry.sink, targets, region.shape, pool)
        for slot, target in zip(slots, targets, strict=bool(slots)):
            bound.unpack.add(target, slot)
    received, planned = 0 if bound.sink is None else bound.sink.nbytes, counts.stored(stack.members)
    if received != planned:
        raise ValueError(f"{bound.names[0]}: M2N would store {received} bytes on this rank, the plan says {planned}")
    return bound


def _stacked(
    geometry: Geometry, side: SideMesh, views: Sequence[Target], piece: tuple[int, ...], pool: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The buffer of a side, and in it a slot of shape ``piece`` for each view; no slots where one live tensor will
    do."""
    dtype = getattr(torch, geometry.dtype)
    shape = geometry.local_shape(side, len(views))
    live = views[0]
    if len(views) == 1 and isinstance(live, torch.Tensor) and live.is_contiguous() and live.dtype == dtype:
        return live.view(shape), []
    buffer = pool[: prod(shape) * dtype.itemsize].view(dtype)
    slots = buffer.view(len(views), -1)
    return buffer.view(shape), [slot.view(piece) for slot in slots]


def _checked(view: Callable[[str, Region], torch.Tensor], name: str, region: Region, dtype: str) -> torch.Tensor:
    tensor = view(name, region)
    if tuple(tensor.shape) != region.shape or tensor.dtype != getattr(torch, dtype):
        raise ValueError(
            f"{name} {region}: the plan was made for shape {region.shape} of {dtype}, the live tensor has "
            f"{tuple(tensor.shape)} of {tensor.dtype}; describe the rank again and make a new plan"
        )
    return tensor.detach()
