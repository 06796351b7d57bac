"""Strided copies between two tensors, and the boxes of the source that they move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from refit_transport.layout.region import Region

MOST_BOXES = 64
"""A copy that would fall apart into more boxes than this is not worth sending box by box."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a tensor: offset from the tensor's first element, sizes and strides, all in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @classmethod
    def of(cls, view: torch.Tensor, offset: int = 0) -> Strided:
        """``view``, whose tensor begins ``offset`` elements into their common storage."""
        return cls(view.storage_offset() - offset, tuple(view.shape), tuple(view.stride()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """This view of ``tensor``."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a box of a source lands in a tensor: element ``[i0, i1, ...]`` of ``region``, counted from its start, goes
    to element ``offset + sum(i * stride)``."""

    region: Region
    offset: int
    stride: tuple[int, ...]

    def on(self, tensor: torch.Tensor, region: Region) -> torch.Tensor:
        """View of ``tensor`` of shape ``region.shape``, for a ``region`` inside this landing's."""
        inside = sum((a - b) * s for a, b, s in zip(region.start, self.region.start, self.stride, strict=True))
        return tensor.as_strided(region.shape, self.stride, tensor.storage_offset() + self.offset + inside)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def landings(source: Strided, target: Strided, shape: tuple[int, ...]) -> tuple[Landing, ...] | None:
    """The boxes of a contiguous source of ``shape`` that a copy of ``source`` onto ``target`` moves.

    Returns None when the view selects something other than a few boxes (every second column, a repeated element).
    """
    repeats = any(step == 0 for step, size in zip(source.stride, source.size, strict=True) if size > 1)
    if source.size != target.size or source.numel == 0 or repeats:
        return None
    dims = _coalesce([d for d in zip(source.size, source.stride, target.stride, strict=True) if d[0] != 1], shape)
    found: list[Landing] = []
    for offset, begin, kept in _unroll(source.offset, target.offset, dims, shape):
        landing = _one_box(offset, begin, kept, shape)
        if landing is None or len(found) == MOST_BOXES:
            return None
        found.append(landing)
    return tuple(found)


_Dim = tuple[int, int, int]
"""Size, stride in the source, stride in the target."""


def _steps(shape: tuple[int, ...]) -> set[int]:
    return {step for step, size in zip(contiguous_strides(shape), shape, strict=True) if size > 1}


def _coalesce(dims: list[_Dim], shape: tuple[int, ...]) -> list[_Dim]:
    """Outermost source stride first; neighbours that are one longer dimension on both sides are merged."""
    merged: list[_Dim] = []
    for size, src, dst in sorted(dims, key=lambda d: -d[1]):
        outer = merged[-1] if merged else None
        if outer and src in _steps(shape) and outer[1] == size * src and outer[2] == size * dst:
            merged[-1] = (merged[-1][0] * size, src, dst)
        else:
            merged.append((size, src, dst))
    return merged


def _unroll(offset: int, begin: int, dims: list[_Dim], shape: tuple[int, ...]) -> Iterator[tuple[int, int, list[_Dim]]]:
    """Take a dimension whose source stride is no stride of the source apart into single boxes."""
    odd = next((i for i, d in enumerate(dims) if d[1] not in _steps(shape)), None)
    if odd is None:
        yield offset, begin, dims
        return
    size, src, dst = dims[odd]
    rest = dims[:odd] + dims[odd + 1 :]
    for i in range(min(size, MOST_BOXES + 1)):
        yield from _unroll(offset + i * src, begin + i * dst, rest, shape)


def _one_box(offset: int, begin: int, dims: list[_Dim], shape: tuple[int, ...]) -> Landing | None:
    strides = contiguous_strides(shape)
    start = []
    for size, step in zip(shape, strides, strict=True):
        start.append(0 if size == 1 else offset // step)
        offset -= start[-1] * step
    extent, target = [1] * len(shape), [0] * len(shape)
    axis_of = {step: axis for axis, step in enumerate(strides) if shape[axis] > 1}
    for size, src, dst in dims:
        while size > 1:
            axis = axis_of.get(src)
            if axis is None or extent[axis] != 1:
                return None
            take = size if size <= shape[axis] - start[axis] else shape[axis]
            if take != size and (start[axis] or size % take):
                return None
            extent[axis], target[axis] = take, dst
            size, src, dst = size // take, src * take, dst * take
    stop = tuple(a + n for a, n in zip(start, extent, strict=True))
    return Landing(Region(tuple(start), stop), begin, tuple(target))


def overlapping(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Positions of two regions that share an element, or None. Linear in practice: a sweep over the first dimension."""
    order = sorted(range(len(regions)), key=lambda i: regions[i])
    active: list[int] = []
    for i in order:
        region = regions[i]
        if region.start:
            active = [j for j in active if regions[j].stop[0] > region.start[0]]
        for j in active:
            if regions[j].intersect(region) is not None:
                return (j, i)
        active.append(i)
    return None
