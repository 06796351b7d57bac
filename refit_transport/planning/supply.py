"""Adds up, over a whole plan, which ranks can send and receive what; decides how many copies the trainers send."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .balance import Candidates, fair_fractions

WORTH_IT = 1.02
"""Copies that make the busiest trainer at most this much busier than the busiest receiver are sent without relay."""


@dataclass(slots=True)
class Supply:
    """Bytes by set of candidate ranks."""

    copied: dict[Candidates, dict[int, float]] = field(default_factory=dict)
    """``{holders: {copies needed: bytes of one copy}}``."""
    receiving: dict[Candidates, float] = field(default_factory=dict)
    near: dict[Candidates, float] = field(default_factory=dict)
    """Bytes that holders send to ranks of their own domain."""

    def send(self, holders: Candidates, copies: int, nbytes: float) -> None:
        by_copies = self.copied.setdefault(holders, {})
        by_copies[copies] = by_copies.get(copies, 0.0) + nbytes

    def receive(self, ranks: Candidates, nbytes: float) -> None:
        self.receiving[ranks] = self.receiving.get(ranks, 0.0) + nbytes

    def lend(self, holders: Candidates, nbytes: float) -> None:
        self.near[holders] = self.near.get(holders, 0.0) + nbytes

    def sending(self, chains: int) -> dict[Candidates, float]:
        """Bytes that holders send when they serve at most ``chains`` domains themselves."""
        return {
            holders: sum(min(chains, copies) * nbytes for copies, nbytes in by_copies.items())
            for holders, by_copies in self.copied.items()
        }

    @property
    def most_copies(self) -> int:
        return max((copies for by_copies in self.copied.values() for copies in by_copies), default=1)


def choose_chains(supply: Supply, relay: str) -> int:
    """How many copies of each byte its holders send; any further domain is served by a domain that has one.

    ``auto`` takes the largest number at which the busiest trainer is no busier than it would be anyway (with one copy),
    or than the busiest receiver is: relaying could not end sooner, and every relay adds a hop.
    """
    if relay == "always":
        return 1
    most = supply.most_copies
    if relay == "never" or most == 1:
        return most
    allowed = WORTH_IT * max(_peak(supply.sending(1)), _peak(supply.receiving))
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if _peak(supply.sending(middle)) <= allowed:
            low = middle
        else:
            high = middle - 1
    return low


def _peak(demand: dict[Candidates, float]) -> float:
    """Bytes of the busiest rank when all is shared out fairly."""
    loads: dict[int, float] = {}
    for candidates, fractions in fair_fractions(demand).items():
        for rank, share in zip(candidates, (np.asarray(fractions) * demand[candidates]).tolist()):
            loads[rank] = loads.get(rank, 0.0) + share
    return max(loads.values(), default=0.0)
