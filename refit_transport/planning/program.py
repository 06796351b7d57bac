"""One rank's part of a plan, ready to run: per bucket the messages it sends and receives and the pieces in them.

A message is the concatenation of its pieces; a piece is a region of a parameter, row-major, in its wire dtype. Inside
a message pieces are ordered by falling item size, so each is aligned to its dtype and no padding travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .plan import Link


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Struct of arrays, one row per piece of this rank. Regions are padded with ``[0, 1)`` up to ``ndim`` columns."""

    parameter: np.ndarray
    """int32, index into ``Plan.parameters``."""
    group: np.ndarray
    """int32, index into ``Plan.groups``: a parameter that engines hold differently is in several."""
    start: np.ndarray
    """int64 [rows, ndim], global coordinates."""
    stop: np.ndarray
    """int64 [rows, ndim]."""
    offset: np.ndarray
    """int64, byte offset inside its message."""
    nbytes: np.ndarray
    """int64, in the wire dtype."""
    origin: np.ndarray
    """int64: for a piece that is forwarded, the row of the received piece it repeats; -1 for the rank's own data."""
    wanted: np.ndarray
    """bool: for a received piece, whether this rank stores it (False: it only relays it)."""

    def __len__(self) -> int:
        return len(self.parameter)


class Message(NamedTuple):
    """Bytes that travel between this rank and ``peer`` in one bucket and hop. Rows ``[first, last)`` of the table."""

    peer: int
    hop: int
    link: Link
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BucketProgram:
    """One rank's share of one bucket."""

    sends: tuple[Message, ...]
    """By hop, then in the order in which they should start (rotated per source, so that no peer starves)."""
    recvs: tuple[Message, ...]
    local: tuple[int, int]
    """Rows of the pieces this rank copies from its own source tensor to its own destination tensor."""
    whole: tuple[tuple[int, int], ...]
    """(parameter, nbytes in the destination dtype) of every whole tensor that is complete after this bucket."""


@dataclass(frozen=True, slots=True)
class Program:
    """Everything one rank does in a refit."""

    rank: int
    pieces: PieceTable
    buckets: tuple[BucketProgram, ...]
    digest: str
    """Of the plan that this program was compiled from."""
