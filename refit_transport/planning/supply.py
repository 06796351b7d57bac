"""Adds up, over a whole plan, which ranks can send and receive what; decides how many copies the trainers send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .balance import Candidates, fair_fractions

WORTH_IT = 1.02
"""Trainers may be busier than the bottleneck by this factor before anything is relayed for them."""


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

    def sending(self, shares: Mapping[Candidates, float] | None = None) -> dict[Candidates, float]:
        """Bytes that holders send when they serve a share of the domains themselves; without ``shares``, all."""
        return {
            holders: sum(
                (copies if shares is None else own_copies(shares[holders], copies)) * nbytes
                for copies, nbytes in by_copies.items()
            )
            for holders, by_copies in self.copied.items()
        }

    def total_sending(self) -> dict[Candidates, float]:
        """Bytes that holders send when each byte leaves them once."""
        return {holders: sum(by_copies.values()) for holders, by_copies in self.copied.items()}


def own_copies(share: float, copies: int) -> int:
    """How many of ``copies`` the holders send themselves; the others are relayed from domain to domain."""
    return max(1, int(copies * share + 1e-9))


def own_shares(supply: Supply, relay: str, ports: np.ndarray | None = None) -> dict[Candidates, float]:
    """The share of its copies that each set of holders sends itself. ``ports``: by rank the number of its network port,
    None where each has its own.

    ``auto`` relays only for holders that would else be busier than the refit's bottleneck: the busiest receiver, or the
    busiest sender if each byte left the trainers once. Relaying more could not end sooner, and every relay adds a hop.
    """

    def port(rank: int) -> int:
        return rank if ports is None else int(ports[rank])

    def loads_of(demand: dict[Candidates, float]) -> dict[int, float]:
        """Bytes by port."""
        loads: dict[int, float] = {}
        for rank, nbytes in fair_loads(demand).items():
            loads[port(rank)] = loads.get(port(rank), 0.0) + nbytes
        return loads

    if relay != "auto":
        return dict.fromkeys(supply.copied, 1.0 if relay == "never" else 0.0)
    once = max(loads_of(supply.total_sending()).values(), default=0.0)
    allowed = WORTH_IT * max(once, max(loads_of(supply.receiving).values(), default=0.0))
    loads = loads_of(supply.sending())
    return {holders: min(1.0, allowed / max(max(loads[port(r)] for r in holders), 1.0)) for holders in supply.copied}


def fair_loads(demand: dict[Candidates, float]) -> dict[int, float]:
    """Bytes by rank when all is shared out fairly."""
    loads: dict[int, float] = {}
    for candidates, fractions in fair_fractions(demand).items():
        for rank, share in zip(candidates, (fractions * demand[candidates]).tolist()):
            loads[rank] = loads.get(rank, 0.0) + share
    return loads
