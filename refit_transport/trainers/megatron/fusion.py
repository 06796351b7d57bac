"""How a Megatron tensor is composed of checkpoint tensors along one axis, and which boxes of them a rank's shard is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from refit_transport.layout.region import LayoutError, Region

from .groups import GroupRank


@dataclass(frozen=True, slots=True)
class Part:
    """Indices ``[start, start + size)`` of checkpoint tensor ``name`` along the axis; padding when ``name`` is None."""

    name: str | None
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Fused:
    """The whole Megatron tensor is the concatenation of ``parts`` along ``axis``. Tensor parallelism cuts either the
    concatenation into equal ranges, or ``each`` part by itself, so that a rank holds one range of every part."""

    axis: int
    parts: tuple[Part, ...]
    each: bool = False
    expert: bool = False
    """Cut by the expert-tensor-parallel group instead of the tensor-parallel group."""

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a checkpoint tensor of global ``shape``, and the local memory that stores it."""

    name: str
    shape: tuple[int, ...]
    region: Region
    view: torch.Tensor


def replicated(name: str, size: int) -> Fused:
    """A tensor that every rank holds whole; ``size`` is the length of its first dimension."""
    return Fused(0, (Part(name, 0, size),))


def rows(name: str, size: int, *, expert: bool = False) -> Fused:
    """A tensor of ``size`` rows, cut by rows."""
    return Fused(0, (Part(name, 0, size),), expert=expert)


def columns(name: str, size: int, *, expert: bool = False) -> Fused:
    """A tensor of ``size`` columns, cut by columns."""
    return Fused(1, (Part(name, 0, size),), expert=expert)


def stacked(names: Sequence[str], size: int, *, expert: bool = False) -> Fused:
    """Tensors of ``size`` rows each, on top of each other, each cut by rows (gate and up projections)."""
    return Fused(0, tuple(Part(name, 0, size) for name in names), each=True, expert=expert)


def boxes(fused: Fused, local: torch.Tensor, group: GroupRank, where: str) -> Iterator[Held]:
    """Every box of ``local``, this rank's shard. Whether it is cut at all is read from its size, because Megatron's own
    layers and TransformerEngine's differ in that. ``where`` names the parameter in errors. Raises LayoutError."""
    length = local.shape[fused.axis]
    if length == fused.total:
        group = GroupRank(1, 0)
    elif length * group.size != fused.total:
        raise LayoutError(
            f"{where}: has {length} entries in dimension {fused.axis}; allowed are {fused.total} (whole) or, on "
            f"{group.size} tensor-parallel ranks, {fused.total / group.size:g}"
        )
    sizes = {name: _length(fused, name) for name in {part.name for part in fused.parts} - {None}}
    for name, offset, start, stop in _joined(_ranges(fused, group, where)):
        whole = [*local.shape]
        whole[fused.axis] = sizes[name]
        low, high = [0] * local.ndim, [*whole]
        low[fused.axis], high[fused.axis] = start, stop
        view = local.narrow(fused.axis, offset, stop - start)
        yield Held(name, tuple(whole), Region(tuple(low), tuple(high)), view)


def _length(fused: Fused, name: str) -> int:
    return max(part.start + part.size for part in fused.parts if part.name == name)


_Range = tuple[str | None, int, int, int]
"""Name, offset in the shard, start and stop in the checkpoint tensor."""


def _joined(ranges: Iterable[_Range]) -> Iterator[tuple[str, int, int, int]]:
    """Ranges that continue each other in the shard and in the checkpoint as one; padding and empty ones dropped."""
    joined: list[tuple[str, int, int, int]] = []
    for name, offset, start, stop in ranges:
        if name is None or start >= stop:
            continue
        if (
            joined
            and joined[-1][0] == name
            and joined[-1][3] == start
            and offset - joined[-1][1] == start - joined[-1][2]
        ):
            joined[-1] = (name, *joined[-1][1:3], stop)
        else:
            joined.append((name, offset, start, stop))
    yield from joined


def _ranges(fused: Fused, group: GroupRank, where: str) -> Iterator[_Range]:
    """What this rank holds of every part."""
    if fused.each:
        offset = 0
        for part in fused.parts:
            share, rest = divmod(part.size, group.size)
            if rest:
                raise LayoutError(f"{where}: {part.name} has {part.size} entries, not a multiple of {group.size} ranks")
            start = part.start + group.rank * share
            yield part.name, offset, start, start + share
            offset += share
        return
    share = fused.total // group.size
    low, high = group.rank * share, (group.rank + 1) * share
    position = 0
    for part in fused.parts:
        first, last = max(position, low), min(position + part.size, high)
        if first < last:
            shift = part.start - position
            yield part.name, first - low, first + shift, last + shift
        position += part.size
