"""Cuts atoms into stripes: contiguous runs of rows of which each has one sender or one receiver.

All atoms of a demand are laid end to end on one axis of rows. A segmentation cuts that axis and names an owner for each
segment; two segmentations are joined by uniting their cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .atoms import Atoms


@dataclass(frozen=True, slots=True, eq=False)
class RowAxis:
    """Where each atom's rows lie on the common axis, along the dimension in which the atom is cut."""

    dim: np.ndarray
    """int64 [atoms]."""
    first: np.ndarray
    """int64 [atoms + 1]: axis position of each atom's first row, then the end."""
    row_bytes: np.ndarray
    """int64 [atoms]."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """``owner[i]`` has the rows ``[start[i], start[i + 1])`` of the axis; every atom's first row is a start."""

    start: np.ndarray
    owner: np.ndarray
    dealt: dict[int, np.ndarray]
    """By number of the class: the fraction of its bytes that each of its owners really got."""


def row_axis(atoms: Atoms, parts: np.ndarray, itemsize: int) -> RowAxis:
    """Each atom is cut along its first dimension that gives ``parts`` (int64 [atoms]) equal or nearly equal runs, else
    along its longest. The first dimensions are tried first because their rows are the longest runs of memory."""
    extent = atoms.stop - atoms.start
    good = (extent % parts[:, None] == 0) | (extent >= 16 * parts[:, None])
    dim = np.where(good.any(axis=1), good.argmax(axis=1), extent.argmax(axis=1))
    rows = np.take_along_axis(extent, dim[:, None], axis=1)[:, 0]
    return RowAxis(dim, np.r_[0, np.cumsum(rows)], atoms.numel // np.maximum(rows, 1) * itemsize)


@dataclass(slots=True)
class Dealer:
    """Makes segmentations of one axis; remembers cuts, because domains are mostly alike."""

    axis: RowAxis
    stripe_bytes: int
    """A cut comes no closer than half of this to an atom's edge."""
    _known: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def segment(
        self, owner: np.ndarray, classes: Sequence[tuple[int, np.ndarray, Sequence[int], np.ndarray]]
    ) -> Segments:
        """``owner`` (int64 [atoms]) names the owner of whole atoms; each of ``classes`` (number, atoms, owners,
        fractions) shares its atoms' bytes out instead: every owner takes one contiguous run, cut between rows."""
        if not classes:
            return Segments(self.axis.first[:-1], owner, {})
        starts, owners, dealt = [], [], {}
        whole = np.ones(len(owner), bool)
        for number, atoms, members, fractions in classes:
            whole[atoms] = False
            start, index, dealt[number] = self._deal(atoms, fractions)
            starts.append(start)
            owners.append(np.asarray(members, np.int64)[index])
        starts.append(self.axis.first[:-1][whole])
        owners.append(owner[whole])
        start, who = np.concatenate(starts), np.concatenate(owners)
        order = np.argsort(start, kind="stable")
        return Segments(start[order], who[order], dealt)

    def _deal(self, atoms: np.ndarray, fractions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = atoms.tobytes(), fractions.tobytes()
        if key not in self._known:
            self._known[key] = _deal(self.axis, atoms, fractions, self.stripe_bytes)
        return self._known[key]


def _deal(
    axis: RowAxis, atoms: np.ndarray, fractions: np.ndarray, stripe_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Axis positions at which a new owner or a new atom starts, the owner's index there, and the fractions dealt."""
    rows = (axis.first[1:] - axis.first[:-1])[atoms]
    at_row = np.r_[0, np.cumsum(rows)]
    at_byte = np.r_[0, np.cumsum(rows * axis.row_bytes[atoms])]
    edge = np.cumsum(fractions)[:-1] / fractions.sum() * at_byte[-1]
    inside = np.clip(np.searchsorted(at_byte, edge, side="right") - 1, 0, len(atoms) - 1)
    row_bytes = np.maximum(axis.row_bytes[atoms][inside], 1)
    row = np.rint((edge - at_byte[inside]) / row_bytes).astype(np.int64)
    keep_off = np.minimum(-(-stripe_bytes // row_bytes), -(-rows[inside] // 2)) // 2
    row = np.where(row < keep_off, 0, np.where(rows[inside] - row < keep_off, rows[inside], row))
    cut = np.maximum.accumulate(at_row[inside] + row) if len(row) else row
    start = np.unique(np.concatenate([at_row[:-1], cut[cut < at_row[-1]]]))
    index = np.searchsorted(cut, start, side="right")
    position = np.searchsorted(at_row, start, side="right") - 1
    size = np.diff(np.r_[start, at_row[-1]]) * axis.row_bytes[atoms[position]]
    dealt = np.bincount(index, size, len(fractions)) / at_byte[-1]
    return axis.first[atoms[position]] + start - at_row[position], index, dealt


def unite(segmentations: Sequence[Segments]) -> np.ndarray:
    """All starts of all segmentations, ascending."""
    if len(segmentations) == 1:
        return segmentations[0].start
    return np.unique(np.concatenate([segments.start for segments in segmentations]))


def owners_at(segments: Segments, start: np.ndarray) -> np.ndarray:
    return segments.owner[np.searchsorted(segments.start, start, side="right") - 1]


def stripe_boxes(atoms: Atoms, axis: RowAxis, start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(atom, region start, region stop) of the stripes that begin at ``start``, each up to the next one."""
    atom = np.searchsorted(axis.first, start, side="right") - 1
    end = np.r_[start[1:], axis.first[-1]]
    low, high = atoms.start[atom].copy(), atoms.stop[atom].copy()
    at = np.arange(len(atom)), axis.dim[atom]
    offset = low[at] - axis.first[atom]
    low[at], high[at] = offset + start, offset + end
    return atom, low, high
