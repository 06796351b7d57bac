"""Which ranks share a fast link: looks up domains and splits sets of ranks by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .plan import PlanError
from .transfers import Link

DomainSplit = tuple[tuple[int, tuple[int, ...]], ...]
"""(domain, its ranks of the set), by ascending domain."""


@dataclass(slots=True)
class Fabric:
    """Domains of the world. ``once_per_domain`` False makes every rank count as a destination of its own."""

    domains: Sequence[Sequence[int]]
    once_per_domain: bool = True
    domain_of: np.ndarray = field(init=False)
    """int32 by rank, -1 for a rank in no domain."""
    _splits: dict[tuple[int, ...], DomainSplit] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        ranks = [rank for domain in self.domains for rank in domain]
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            twice = sorted({rank for rank in ranks if ranks.count(rank) > 1 or rank < 0})
            raise PlanError(f"every rank belongs to exactly one domain and is not negative; check ranks {twice}")
        self.domain_of = np.full(max(ranks, default=-1) + 2, -1, np.int32)  # the last one is for rank -1
        for number, domain in enumerate(self.domains):
            self.domain_of[list(domain)] = number

    def has(self, rank: int) -> bool:
        return 0 <= rank < len(self.domain_of) - 1 and self.domain_of[rank] >= 0

    def split(self, ranks: tuple[int, ...]) -> DomainSplit:
        """``ranks`` by domain."""
        if ranks not in self._splits:
            found: dict[int, list[int]] = {}
            for rank in ranks:
                found.setdefault(int(self.domain_of[rank]), []).append(rank)
            self._splits[ranks] = tuple((domain, tuple(found[domain])) for domain in sorted(found))
        return self._splits[ranks]

    def links(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """int8 values of ``Link`` for pairs of ranks."""
        near = self.domain_of[src] == self.domain_of[dst]
        return np.where(src == dst, Link.LOCAL, np.where(near, Link.DOMAIN, Link.NETWORK)).astype(np.int8)
