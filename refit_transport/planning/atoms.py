"""Atoms: the boxes that remain when a parameter is cut along the boundaries of both sides' regions.

All elements of an atom are held by the same ranks and needed by the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_transport.layout.layout import Cell
from refit_transport.layout.region import Region


class CoverageError(ValueError):
    """A part of the destination that no source holds, or that one rank would receive twice."""


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Disjoint boxes in ascending order, which cover the destination exactly."""

    start: np.ndarray
    """int64 [atoms, ndim]; a 0-D parameter counts as one row of one element."""
    stop: np.ndarray
    """int64 [atoms, ndim]."""
    holders: np.ndarray
    """int32 [atoms], index into ``holder_sets``."""
    needers: np.ndarray
    """int32 [atoms], index into ``needer_sets``."""
    holder_sets: tuple[tuple[int, ...], ...]
    needer_sets: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> np.ndarray:
        return np.prod(self.stop - self.start, axis=1)


def cut_atoms(shape: tuple[int, ...], source: Sequence[Cell], sink: Sequence[Cell]) -> Atoms:
    """Raises CoverageError for a gap or an overlap, with the region and the ranks."""
    ndim = max(len(shape), 1)
    cuts = [_cuts(dim, ndim, source, sink) for dim in range(ndim)]
    held, holder_sets = _label(cuts, source, "")
    needed, needer_sets = _label(cuts, sink, "receives")
    gaps = np.flatnonzero((needed >= 0) & (held < 0))
    if len(gaps):
        box = _boxes(cuts, *(np.array(np.unravel_index(gaps[:1], _grid(cuts))).T,) * 2)
        region = Region(tuple(box[0][0].tolist()), tuple(box[1][0].tolist()))
        raise CoverageError(f"no trainer holds {region}, which rank {needer_sets[needed[gaps[0]]][0]} needs")
    wanted = np.flatnonzero(needed >= 0)
    low, high = _join(cuts, wanted, _numbered(held, needed, _owners(cuts, source), _owners(cuts, sink))[wanted])
    cell = np.ravel_multi_index(tuple(low.T), _grid(cuts)) if len(low) else np.zeros(0, np.int64)
    start, stop = _boxes(cuts, low, high)
    order = np.lexsort(start.T[::-1])
    cell = cell[order]
    return Atoms(start[order], stop[order], held[cell], needed[cell], holder_sets, needer_sets)


def _bounds(region: Region) -> list[tuple[int, int]]:
    return list(zip(region.start, region.stop)) or [(0, 1)]


def _cuts(dim: int, ndim: int, source: Sequence[Cell], sink: Sequence[Cell]) -> np.ndarray:
    return np.array(sorted({edge for cell in (*source, *sink) for edge in _bounds(cell.region)[dim]}), np.int64)


def _grid(cuts: list[np.ndarray]) -> tuple[int, ...]:
    return tuple(max(len(edges) - 1, 0) for edges in cuts)


def _label(cuts: list[np.ndarray], cells: Sequence[Cell], verb: str) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Per grid box (flat, int32) the number of the set of ranks whose cells cover it, -1 for none; and the sets.
    With ``verb``, cells of one rank that overlap are an error."""
    index = [{int(edge): i for i, edge in enumerate(edges)} for edges in cuts]
    label = np.full(_grid(cuts), -1, np.int32)
    numbers: dict[tuple[int, ...], int] = {}
    sets: list[tuple[int, ...]] = []

    def number(ranks: tuple[int, ...]) -> int:
        if ranks not in numbers:
            numbers[ranks] = len(sets)
            sets.append(ranks)
        return numbers[ranks]

    for cell in cells:
        box = tuple(slice(at[a], at[b]) for at, (a, b) in zip(index, _bounds(cell.region)))
        view = label[box]
        if (view < 0).all():
            label[box] = number(cell.ranks)
            continue
        merged = view.copy()
        for before in np.unique(view).tolist():
            others = sets[before] if before >= 0 else ()
            if verb and (twice := set(others) & set(cell.ranks)):
                raise CoverageError(f"rank {min(twice)} {verb} part of {cell.region} twice: its regions overlap")
            merged[view == before] = number(tuple(sorted({*others, *cell.ranks})))
        label[box] = merged
    return label.reshape(-1), tuple(sets)


def _owners(cuts: list[np.ndarray], cells: Sequence[Cell]) -> np.ndarray:
    """Per grid box (flat, int64) a number that differs where the cells that cover it differ: a rank that holds two
    boxes side by side stores them apart, so that they must not become one."""
    index = [{int(edge): i for i, edge in enumerate(edges)} for edges in cuts]
    owners = np.zeros(_grid(cuts), np.int64)
    mixed = np.random.default_rng(0).integers(1, 1 << 62, len(cells))
    for cell, number in zip(cells, mixed):
        owners[tuple(slice(at[a], at[b]) for at, (a, b) in zip(index, _bounds(cell.region)))] += number
    return owners.reshape(-1)


def _numbered(*labels: np.ndarray) -> np.ndarray:
    """One number per combination of labels."""
    return np.unique(np.stack([label.astype(np.int64) for label in labels]), axis=1, return_inverse=True)[1].reshape(-1)


def _join(cuts: list[np.ndarray], boxes: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Grid boxes of one key become a single box where they fill it. Returns the first and last grid index of each
    joined box, both int64 [boxes, ndim]."""
    index = np.array(np.unravel_index(boxes, _grid(cuts))).T.reshape(len(boxes), len(cuts))
    if not len(boxes):
        return index, index
    order = np.argsort(key, kind="stable")
    index, key = index[order], key[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    count = np.diff(np.r_[first, len(key)])
    low, high = np.minimum.reduceat(index, first), np.maximum.reduceat(index, first)
    full = np.prod(high - low + 1, axis=1) == count
    ragged = ~np.repeat(full, count)
    return np.concatenate([low[full], index[ragged]]), np.concatenate([high[full], index[ragged]])


def _boxes(cuts: list[np.ndarray], low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    start = np.stack([edges[low[:, dim]] for dim, edges in enumerate(cuts)], axis=1)
    stop = np.stack([edges[high[:, dim] + 1] for dim, edges in enumerate(cuts)], axis=1)
    return start.reshape(-1, len(cuts)), stop.reshape(-1, len(cuts))
