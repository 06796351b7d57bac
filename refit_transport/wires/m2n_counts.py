"""What a plan moves of a group's members, so that a call that moves whole members is counted when it is made.

The library does not say how it routes a call, so its bytes are put down to the links that the plan gives them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from refit_transport.layout.layout import ITEMSIZE
from refit_transport.planning.plan import Link, TransferGroup

from .base import WireStats


@dataclass(frozen=True, slots=True)
class MemberCounts:
    """Bytes of one member of a group on one rank, by link class."""

    sent: dict[str, int]
    received: dict[str, int]
    stored: int
    """What of ``received`` the rank keeps."""

    @classmethod
    def of(cls, group: TransferGroup, rank: int) -> MemberCounts:
        """Of the group alone: a parameter that some ranks hold directly and others whole is in two."""
        table = group.transfers
        nbytes = table.numel * ITEMSIZE[group.wire_dtype]

        def by_link(mine: np.ndarray) -> dict[str, int]:
            return {link.name.lower(): int(nbytes[mine & (table.link == link)].sum()) for link in Link}

        arriving = table.dst == rank
        return cls(by_link(table.src == rank), by_link(arriving), int(nbytes[arriving & table.wanted].sum()))


def call_counts(members: Iterable[MemberCounts]) -> WireStats:
    """What one call moves that carries all of ``members``."""
    stats = WireStats()
    for member in members:
        for mine, theirs in ((stats.sent, member.sent), (stats.received, member.received)):
            for link, nbytes in theirs.items():
                mine[link] += nbytes
    return stats
