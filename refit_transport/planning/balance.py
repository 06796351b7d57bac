"""Shares out bytes among ranks that can all send (or receive) them, so that the busiest rank is as idle as possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

REPAIR_FROM = 0.01
"""Deviations from the fair fractions below this share of a group's bytes wait, so that groups keep one set of cuts."""

Candidates = tuple[int, ...]
"""Ranks that may each take any part of some bytes, ascending."""


def water_fill(loads: np.ndarray, amount: float) -> np.ndarray:
    """How much of ``amount`` each rank takes, so that the lowest loads rise to one level. In the unit of ``loads``."""
    order = np.sort(loads)
    filled = np.arange(1, len(order) + 1) * order - np.cumsum(order)
    wet = int(np.searchsorted(filled, amount, side="right"))
    level = (amount + order[:wet].sum()) / wet
    return np.maximum(level - loads, 0.0)


def fair_fractions(demand: Mapping[Candidates, float], rounds: int = 64) -> dict[Candidates, np.ndarray]:
    """Per set of candidates the fraction that each of them takes, with the busiest rank as idle as it can be.

    Bytes with one candidate come first, then sets are filled in turn until nothing moves: descent by blocks on the sum
    of squared loads, whose minimum has also the smallest maximum.
    """
    ranks = sorted({rank for candidates in demand for rank in candidates})
    index = {rank: i for i, rank in enumerate(ranks)}
    loads = np.zeros(len(ranks))
    for candidates, amount in demand.items():
        if len(candidates) == 1:
            loads[index[candidates[0]]] += amount
    sets = sorted((c for c in demand if len(c) > 1), key=lambda candidates: (len(candidates), candidates))
    columns = {candidates: np.array([index[rank] for rank in candidates]) for candidates in sets}
    taken = {candidates: np.zeros(len(candidates)) for candidates in sets}
    tolerance = 1e-4 * sum(demand.values()) / max(len(ranks), 1)
    for _ in range(rounds):
        moved = 0.0
        for candidates in sets:
            at = columns[candidates]
            before = taken[candidates]
            loads[at] -= before
            after = water_fill(loads[at], demand[candidates])
            loads[at] += after
            taken[candidates] = after
            moved = max(moved, float(np.abs(after - before).max()))
        if moved <= tolerance:
            break
    fractions = {candidates: np.ones(1) for candidates in demand if len(candidates) == 1}
    for candidates, share in taken.items():
        total = share.sum()
        fractions[candidates] = share / total if total > 0 else np.full(len(share), 1 / len(share))
    return fractions


@dataclass(slots=True)
class Ledger:
    """Deals bytes out by fixed fractions, and lets later bytes make up for what earlier ones could not be cut into."""

    fractions: Mapping[Candidates, np.ndarray]
    dealt: dict[Candidates, np.ndarray] = field(default_factory=dict)

    def shares(self, candidates: Candidates, amount: float, parts: int) -> np.ndarray:
        """Fractions of ``amount`` for each candidate, at most ``parts`` of them above zero."""
        fraction = self.fractions[candidates]
        dealt = self.dealt.get(candidates)
        if dealt is None:
            due = fraction
        else:
            due = np.maximum(fraction * (dealt.sum() + amount) - dealt, 0.0) / amount
            if np.abs(due - fraction).max() < REPAIR_FROM:
                due = fraction
        if parts < len(due):
            keep = np.argsort(-np.round(due, 9), kind="stable")[:parts]
            kept = np.zeros(len(due))
            kept[keep] = due[keep]
            due = kept
        total = due.sum()
        return np.round(due / total, 6) if total > 0 else np.round(fraction, 6)

    def charge(self, candidates: Candidates, amounts: np.ndarray) -> None:
        """Note what each candidate really took."""
        dealt = self.dealt.get(candidates)
        self.dealt[candidates] = amounts.copy() if dealt is None else dealt + amounts
