"""What a program moves of each parameter, so that a call that moves whole parameters is counted when it is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refit_transport.planning.plan import Link
from refit_transport.planning.program import Program

from .base import WireStats


class ParameterCounts:
    """Bytes of one rank by parameter, direction and link class. The library does not say how it routes a call, so its
    bytes are put down to the links that the plan gives them."""

    def __init__(self, program: Program, parameters: int) -> None:
        table = program.pieces
        links = {sending: np.full(len(table), -1, np.int8) for sending in (True, False)}
        for bucket in program.buckets:
            for sending, messages in ((True, bucket.sends), (False, bucket.recvs)):
                for message in messages:
                    links[sending][message.first : message.last] = message.link

        def by_parameter(rows: np.ndarray) -> np.ndarray:
            return np.bincount(table.parameter[rows], table.nbytes[rows], parameters).astype(np.int64)

        self._moved = {
            (sending, link): by_parameter(of_row == link) for sending, of_row in links.items() for link in Link
        }
        self._stored = by_parameter((links[False] >= 0) & table.wanted)

    def of(self, parameters: Sequence[int]) -> WireStats:
        """What one call moves that carries all of ``parameters`` (indices)."""
        stats, chosen = WireStats(), list(parameters)
        for (sending, link), nbytes in self._moved.items():
            (stats.sent if sending else stats.received)[link.name.lower()] = int(nbytes[chosen].sum())
        return stats

    def stored(self, parameters: Sequence[int]) -> int:
        """Bytes of ``parameters`` that this rank receives and keeps."""
        return int(self._stored[list(parameters)].sum())
