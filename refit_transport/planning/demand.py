"""What has to reach whom: the atoms of a pair of layouts, sorted by how far their nearest holder is.

A source layout is described by *slots*: its ranks numbered by first occurrence. Layouts of the same pattern (the
experts of sixteen trainer ranks, say) then share one demand, and slot s is written as the code ``-(s + 1)`` wherever a
rank is meant, so that codes and joint ranks can stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_transport.layout.layout import Cell, Layout

from .atoms import Atoms
from .fabric import Fabric

Pattern = tuple[Cell, ...]
"""Cells whose ranks are slots."""


def pattern_of(layout: Layout) -> tuple[Pattern, tuple[int, ...]]:
    """The pattern of a layout, and the joint rank of each slot."""
    slots: dict[int, int] = {}
    cells = tuple(
        Cell(cell.region, tuple(slots.setdefault(rank, len(slots)) for rank in cell.ranks)) for cell in layout.cells
    )
    return cells, tuple(slots)


def code(slot: int) -> int:
    return -(slot + 1)


def decode(codes: np.ndarray, slot_ranks: np.ndarray) -> np.ndarray:
    """Joint ranks for an array that mixes codes and joint ranks."""
    if not len(codes):
        return codes
    return np.where(codes < 0, slot_ranks[np.clip(-codes - 1, 0, len(slot_ranks) - 1)], codes).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Who needs which atoms. ``holders`` are codes, needers are joint ranks."""

    atoms: Atoms
    holders: tuple[tuple[int, ...], ...]
    """Codes (or the joint rank of a broadcast root) by ``atoms.holders``."""
    local: tuple[tuple[int, int, np.ndarray], ...]
    """(holder, the same rank as needer, atoms)."""
    near: tuple[tuple[int, tuple[int, ...], np.ndarray], ...]
    """(needer, holders in its domain, atoms)."""
    far: np.ndarray
    """int32 [atoms, targets]: per target (a domain that holds nothing of the atom) the index of the set of ranks that
    need it there, -1 for none."""
    receivers: tuple[tuple[int, ...], ...]
    """Sets of ranks of one domain."""
    sending: dict[int, dict[int, int]]
    """Elements that a holder set has to send, by the number of copies needed: ``{holder set: {copies: elements}}``."""
    receiving: tuple[int, ...]
    """Elements by receiver set."""
    several: tuple[int, ...]
    """Receiver sets of more than one rank."""
    siblings: np.ndarray
    """int64 [receiver sets, longest]: the ranks of each set, filled up with -1."""

    @property
    def copies(self) -> np.ndarray:
        """int64 [atoms]: how many targets need each atom."""
        return (self.far >= 0).sum(axis=1)


def demand_of(
    atoms: Atoms, holders: Sequence[tuple[int, ...]], placed: Sequence[tuple[int, ...]] | None, fabric: Fabric
) -> Demand:
    """``placed`` gives the joint ranks behind ``holders``, or is None when no holder shares a domain with a needer."""
    pair = atoms.needers.astype(np.int64)
    if placed is not None:
        pair = pair * len(holders) + atoms.holders
    kinds, first, kind = np.unique(pair, return_index=True, return_inverse=True)
    local: list[tuple[int, int, np.ndarray]] = []
    near: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    far: list[dict[object, tuple[int, ...]]] = []
    for number in range(len(kinds)):
        needers = atoms.needer_sets[atoms.needers[first[number]]]
        label = int(atoms.holders[first[number]])
        ranks, codes = (placed[label], holders[label]) if placed is not None else ((), ())
        far.append({})
        for domain, wanting in fabric.split(needers):
            inside = [c for c, rank in zip(codes, ranks) if fabric.domain_of[rank] == domain]
            here = np.flatnonzero(kind == number) if inside else None
            for rank in wanting if inside else ():
                if rank in ranks:
                    local.append((codes[ranks.index(rank)], rank, here))
                else:
                    near.append((rank, tuple(inside), here))
            if not inside and fabric.once_per_domain:
                far[-1][domain] = wanting
            elif not inside:
                far[-1].update({(domain, rank): (rank,) for rank in wanting})
    table, receivers = _table(far)
    all_far = table[kind.reshape(-1)]
    sending, receiving = _totals(atoms, all_far, len(receivers))
    several = tuple(number for number, ranks in enumerate(receivers) if len(ranks) > 1)
    return Demand(
        atoms,
        tuple(holders),
        tuple(local),
        tuple(near),
        all_far,
        receivers,
        sending,
        receiving,
        several,
        _padded(receivers),
    )


def _totals(atoms: Atoms, far: np.ndarray, receivers: int) -> tuple[dict[int, dict[int, int]], tuple[int, ...]]:
    numel = atoms.numel
    copies = (far >= 0).sum(axis=1)
    sending: dict[int, dict[int, int]] = {}
    for key in np.unique(atoms.holders * (far.shape[1] + 1) + copies).tolist():
        holder, count = divmod(key, far.shape[1] + 1)
        if count:
            mine = (atoms.holders == holder) & (copies == count)
            sending.setdefault(holder, {})[count] = int(numel[mine].sum())
    receiving = np.zeros(receivers + 1, np.int64)  # the last one collects the atoms that a target does not need
    np.add.at(receiving, far, numel[:, None])
    return sending, tuple(receiving[:receivers].tolist())


def _table(far: list[dict[object, tuple[int, ...]]]) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """int32 [kinds, targets] of receiver sets, and the sets."""
    targets = {target: i for i, target in enumerate(sorted({t for wanted in far for t in wanted}))}  # type: ignore[type-var]
    sets: dict[tuple[int, ...], int] = {}
    table = np.full((len(far), len(targets)), -1, np.int32)
    for kind, wanted in enumerate(far):
        for target, ranks in wanted.items():
            table[kind, targets[target]] = sets.setdefault(ranks, len(sets))
    return table, tuple(sets)


def _padded(sets: tuple[tuple[int, ...], ...]) -> np.ndarray:
    table = np.full((len(sets), max(map(len, sets), default=0)), -1, np.int64)
    for number, ranks in enumerate(sets):
        table[number, : len(ranks)] = ranks
    return table
