"""From a mesh and placements to the regions that each rank holds. Pure.

``_StridedShard`` has two meanings. Read literally, left to right, it cuts each of ``split_factor`` parts along its mesh
dimension; so DTensor distributes a tensor. FSDP over TP writes it as a mark of order: TP cuts first and FSDP then
chunks what TP left. Both agree on sizes that divide evenly and differ on others, so the local shape decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from .layout import Cell, Layout
from .mesh import Mesh
from .placements import Placement, Replicate, Shard, StridedShard
from .region import LayoutError, Region

Intervals = tuple[tuple[int, int], ...]
"""Half-open ranges of global indices of one tensor dimension, in local order."""


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Range of part ``index`` as ``torch.chunk`` cuts ``size``: ceil-sized parts, the last ones short or empty."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))


def shard_regions(
    shape: Sequence[int],
    mesh: Mesh,
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    *,
    fsdp_over_tp: bool = False,
) -> tuple[Region, ...]:
    """Regions of the rank at ``coordinate``, empty for an empty shard; see the module on ``fsdp_over_tp``."""
    intervals = _intervals(shape, mesh, coordinate, placements, fsdp_over_tp)
    return tuple(
        Region(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in product(*intervals)
    )  # an empty dimension has no interval, hence no box


def local_regions(
    shape: Sequence[int],
    mesh: Mesh,
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    local_shape: Sequence[int],
) -> tuple[Region, ...]:
    """Regions that a local tensor of ``local_shape`` stores, under whichever meaning of ``_StridedShard`` fits it.

    In local order: row-major over the intervals of each dimension. When both meanings fit, that of FSDP over TP is
    taken if the split factor says that later mesh dimensions cut first. Raises LayoutError when neither fits.
    """
    rules = (True, False) if _marks_order(mesh, placements, len(shape)) else (False,)
    tried = []
    for fsdp_over_tp in rules:
        intervals = _intervals(shape, mesh, coordinate, placements, fsdp_over_tp)
        tried.append(tuple(_length(dim) for dim in intervals))
        if tried[-1] == tuple(local_shape):
            return shard_regions(shape, mesh, coordinate, placements, fsdp_over_tp=fsdp_over_tp)
    raise LayoutError(
        f"local shape {tuple(local_shape)} at mesh coordinate {tuple(coordinate)} of {mesh.shape} does not follow from "
        f"global shape {tuple(shape)} and placements {tuple(placements)}: expected {' or '.join(map(str, tried))}"
    )


def mesh_layout(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], *, fsdp_over_tp: bool = False
) -> Layout:
    """The layout of a whole mesh."""
    held = {
        rank: shard_regions(shape, mesh, coordinate, placements, fsdp_over_tp=fsdp_over_tp) for rank, coordinate in mesh
    }
    return region_layout(shape, held)


def region_layout(shape: Sequence[int], held: Mapping[int, Sequence[Region]], name: str = "") -> Layout:
    """The layout of ranks that each hold a plain list of regions (empty ones are dropped).

    Raises LayoutError, with ``name`` in its text, for a region outside ``shape`` or regions of one rank that overlap.
    """
    ranks: dict[Region, list[int]] = {}
    checked: set[tuple[Region, ...]] = set()
    for rank in sorted(held):
        regions = tuple(held[rank])
        if regions not in checked:
            check_regions(shape, regions, rank, name)
            checked.add(regions)
        for region in regions:
            if not region.empty:
                ranks.setdefault(region, []).append(rank)
    return Layout(tuple(shape), tuple(Cell(region, tuple(ranks[region])) for region in sorted(ranks)))


def check_regions(shape: Sequence[int], regions: Sequence[Region], rank: int, name: str) -> None:
    """Raises LayoutError unless ``regions`` lie inside ``shape`` and are disjoint."""
    where = f"{name or 'parameter'} of shape {tuple(shape)} on rank {rank}"
    for region in regions:
        inside = len(region.start) == len(shape) == len(region.stop)
        if not inside or any(not 0 <= a <= b <= n for a, b, n in zip(region.start, region.stop, shape)):
            raise LayoutError(f"{where}: region {region} lies outside the parameter")
    ordered = sorted(region for region in regions if not region.empty)
    for position, region in enumerate(ordered):
        for other in ordered[position + 1 :]:
            if shape and other.start[0] >= region.stop[0]:
                break  # sorted by start: nothing later can reach back into this region
            if common := region.intersect(other):
                raise LayoutError(f"{where}: regions {region} and {other} overlap in {common}")


def _intervals(
    shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int], placements: Sequence[Placement], fsdp_over_tp: bool
) -> list[Intervals]:
    if len(placements) != len(mesh.shape):
        raise LayoutError(f"{len(placements)} placements for a mesh of shape {mesh.shape}: {tuple(placements)}")
    intervals: list[Intervals] = [((0, size),) if size else () for size in shape]
    order = list(range(len(placements)))
    marks = {axis for axis in order if fsdp_over_tp and _is_order_mark(axis, mesh, placements, len(shape))}
    for axis in [a for a in order if a not in marks] + sorted(marks, reverse=True):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = _dim(placement, len(shape))
        parts, index = mesh.shape[axis], coordinate[axis]
        if isinstance(placement, Shard) or axis in marks:
            intervals[dim] = _take(intervals[dim], *chunk(_length(intervals[dim]), parts, index))
        else:
            intervals[dim] = _strided(intervals[dim], placement.split_factor, parts, index)
    return intervals


def _dim(placement: Shard | StridedShard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        raise LayoutError(f"{placement} on a parameter of {ndim} dimensions")
    return placement.dim % ndim


def _marks_order(mesh: Mesh, placements: Sequence[Placement], ndim: int) -> bool:
    return any(_is_order_mark(axis, mesh, placements, ndim) for axis in range(len(placements)))


def _is_order_mark(axis: int, mesh: Mesh, placements: Sequence[Placement], ndim: int) -> bool:
    """Whether the strided shard at ``axis`` only says that later mesh dimensions cut the same tensor dimension first
    (its split factor is their number of parts), and not that the tensor is packed (gate and up in one)."""
    placement = placements[axis]
    if not isinstance(placement, StridedShard):
        return False
    parts = 1
    for later in range(axis + 1, len(placements)):
        other = placements[later]
        if not isinstance(other, Replicate) and _dim(other, ndim) == _dim(placement, ndim):
            parts *= mesh.shape[later]
    return parts > 1 and parts == placement.split_factor


def _length(intervals: Intervals) -> int:
    return sum(b - a for a, b in intervals)


def _take(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Positions ``[start, stop)`` of the concatenated intervals; neighbours are joined."""
    taken: list[tuple[int, int]] = []
    position = 0
    for a, b in intervals:
        low, high = max(start, position), min(stop, position + b - a)
        if low < high:
            piece = (a + low - position, a + high - position)
            if taken and taken[-1][1] == piece[0]:
                piece = (taken.pop()[0], piece[1])
            taken.append(piece)
        position += b - a
    return tuple(taken)


def _strided(intervals: Intervals, split_factor: int, parts: int, index: int) -> Intervals:
    """Part ``index`` of each of ``split_factor`` chunks, joined."""
    size = _length(intervals)
    taken: list[tuple[int, int]] = []
    for piece in range(split_factor):
        low, high = chunk(size, split_factor, piece)
        a, b = chunk(high - low, parts, index)
        for interval in _take(intervals, low + a, low + b):
            if taken and taken[-1][1] == interval[0]:
                interval = (taken.pop()[0], interval[1])
            taken.append(interval)
    return tuple(taken)
