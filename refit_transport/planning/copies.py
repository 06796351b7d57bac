"""Deals several copies of the same bytes out to the ranks that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .demand import Demand
from .stripes import Dealer, RowAxis, Segments

SLIVER = 1e-3
"""A part of a copy smaller than this is left to the copy's other senders: shares are rounded."""

Fractions = dict[int, np.ndarray]
"""By number of a set of several ranks: the fraction of the set's bytes that each rank takes."""

OwnCopies = dict[int, dict[int, int]]
"""``{holder set: {copies needed: copies that the holders send themselves}}``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """The copies of some atoms, laid end to end and shared by their holders."""

    holder_set: int
    atoms: np.ndarray
    elements: int
    """Of one copy."""
    copies: int
    end: np.ndarray
    """float [holders]: where each holder's part of the line ends, in copies."""

    def parts(self, copy: int) -> np.ndarray:
        """How much of ``copy`` each holder sends."""
        part = np.minimum(self.end, copy + 1) - np.maximum(np.r_[0.0, self.end[:-1]], copy)
        return np.where(part < SLIVER, 0.0, part)


def copy_segments(
    demand: Demand, axis: RowAxis, shares: Fractions, own: OwnCopies, stripe_bytes: int
) -> tuple[list[Segments], Fractions]:
    """For each copy, which holder sends which rows; and the fractions that holders really send over all copies.

    Each of many holders thus serves a few domains with large runs, instead of all domains with small ones.
    """
    first = np.array([codes[0] for codes in demand.holders], np.int64)[demand.atoms.holders]
    dealer = Dealer(axis, stripe_bytes)
    lines = [line for index, share in shares.items() for line in _lines(demand, index, share, own[index])]
    sent = {index: np.zeros(len(share)) for index, share in shares.items()}
    copies = max((count for of_set in own.values() for count in of_set.values()), default=0)
    segmentations = []
    for copy in range(copies):
        owner, cut = first.copy(), []
        for number, line in enumerate(lines):
            if copy >= line.copies:
                continue
            part = line.parts(copy)
            if np.count_nonzero(part) > 1:
                cut.append((number, line.atoms, demand.holders[line.holder_set], part))
            else:
                owner[line.atoms] = demand.holders[line.holder_set][int(part.argmax())]
                sent[line.holder_set][part.argmax()] += line.elements
        segments = dealer.segment(owner, cut)
        for number, dealt in segments.dealt.items():
            sent[lines[number].holder_set] += dealt * lines[number].elements
        segmentations.append(segments)
    return segmentations, {index: amount / max(amount.sum(), 1) for index, amount in sent.items()}


def _lines(demand: Demand, holder_set: int, share: np.ndarray, own: dict[int, int]) -> list[_Line]:
    """One line for each number of copies that atoms of the set are needed in."""
    mine, needed, numel = demand.atoms.holders == holder_set, demand.copies, demand.atoms.numel
    lines = []
    for copies, sent in own.items():
        atoms = np.flatnonzero(mine & (needed == copies))
        lines.append(_Line(holder_set, atoms, int(numel[atoms].sum()), sent, np.cumsum(share) / share.sum() * sent))
    return lines
