"""This rank's side of M2N's calls: where members are stacked, and what is copied before and after each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch

from refit_transport.layout.region import Region
from refit_transport.planning.m2n import Geometry, SideMesh, Stack, sink_layout
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import Copies, Target

from .base import WireStats
from .m2n_counts import MemberCounts, call_counts


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
    binding: Binding, stacks: Sequence[Stack], place: int, pool: torch.Tensor | None
) -> tuple[BoundStack, ...]:
    """Views and copies of every stack for the rank at ``place`` of M2N's communicator.

    ``pool`` is uint8 memory for the largest stack, which all stacks share: they run one after the other, and a rank has
    one side of each. Raises ValueError for a tensor that is not as planned.
    """
    groups = binding.plan.groups
    carried = {number for stack in stacks for number in stack.groups}
    counts = {number: MemberCounts.of(groups[number], binding.rank) for number in carried}
    return tuple(_bound(binding, stack, place, pool, counts) for stack in stacks)


def _bound(
    binding: Binding, stack: Stack, place: int, pool: torch.Tensor | None, counts: Mapping[int, MemberCounts]
) -> BoundStack:
    geometry, parameters = stack.geometry, [binding.plan.parameters[member] for member in stack.members]
    moved = [counts[number] for number in stack.groups]
    bound = BoundStack(geometry, tuple(parameter.name for parameter in parameters), call_counts(moved))
    if place in geometry.source.ranks:
        holdings = binding.source.holdings()
        views = [_checked(binding.source.view, p.name, holdings[p.name][0], p.dtype) for p in parameters]
        bound.source, slots = _stacked(geometry, geometry.source, views, [view.shape for view in views], pool)
        for slot, view in zip(slots, views, strict=bool(slots)):
            bound.pack.add(slot, view)
    if place in geometry.sink.ranks:
        targets: list[Target] = []
        shapes: list[tuple[int, ...]] = []
        for number, parameter in zip(stack.groups, parameters, strict=True):
            group = binding.plan.groups[number]
            (region,) = sink_layout(group).regions_of(binding.rank)
            give = partial(_checked, binding.sink.view, parameter.name, region, group.dst_dtype)
            targets.append(give if parameter.name in binding.sink.transient else give())
            shapes.append(region.shape)
        bound.sink, slots = _stacked(geometry, geometry.sink, targets, shapes, pool)
        for slot, target in zip(slots, targets, strict=bool(slots)):
            bound.unpack.add(target, slot)
    received, planned = 0 if bound.sink is None else bound.sink.nbytes, sum(member.stored for member in moved)
    if received != planned:
        raise ValueError(f"{bound.names[0]}: M2N would store {received} bytes on this rank, the plan says {planned}")
    return bound


def _stacked(
    geometry: Geometry,
    side: SideMesh,
    views: Sequence[Target],
    pieces: Sequence[Sequence[int]],
    pool: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The buffer of a side, and in it a slot for each view, of its shape in ``pieces``; no slots where one live tensor
    will do."""
    dtype = getattr(torch, geometry.dtype)
    shape = geometry.local_shape(side, len(views))
    live = views[0]
    if len(views) == 1 and isinstance(live, torch.Tensor) and live.is_contiguous() and live.dtype == dtype:
        return live.view(shape), []
    buffer = pool[: prod(shape) * dtype.itemsize].view(dtype)
    slots = buffer.view(len(views), -1)
    return buffer.view(shape), [slot.view(piece) for slot, piece in zip(slots, pieces, strict=True)]


def _checked(view: Callable[[str, Region], torch.Tensor], name: str, region: Region, dtype: str) -> torch.Tensor:
    tensor = view(name, region)
    if tuple(tensor.shape) != region.shape or tensor.dtype != getattr(torch, dtype):
        raise ValueError(
            f"{name} {region}: the plan was made for shape {region.shape} of {dtype}, the live tensor has "
            f"{tuple(tensor.shape)} of {tensor.dtype}; describe the rank again and make a new plan"
        )
    return tensor.detach()
