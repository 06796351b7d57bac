"""Transfers of a group, as a table of columns: a large plan has millions of them, and they are routed by numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import overload

import numpy as np

from refit_transport.layout.region import Region


class Link(IntEnum):
    """What a transfer crosses."""

    LOCAL = 0
    """Source and destination are the same rank: a copy in its memory."""
    DOMAIN = 1
    """Two ranks of one fast-link domain (an NVLink domain; one host on CPU)."""
    NETWORK = 2
    """Two ranks of different domains."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """``region`` of every member of a group moves from ``src`` to ``dst``.

    ``hop`` orders transfers of the same bytes: a transfer of hop h > 0 forwards what its source received at hop h - 1
    as exactly the same region. ``wanted`` is False for a rank that only relays.
    """

    src: int
    dst: int
    region: Region
    hop: int
    link: Link
    wanted: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class TransferTable(Sequence[Transfer]):
    """A sequence of transfers, one row each. Columns may be shared between groups: never write to them."""

    src: np.ndarray
    """int32 [rows]."""
    dst: np.ndarray
    """int32 [rows]."""
    start: np.ndarray
    """int64 [rows, ndim], global coordinates."""
    stop: np.ndarray
    """int64 [rows, ndim]."""
    hop: np.ndarray
    """int16 [rows]."""
    link: np.ndarray
    """int8 [rows], values of ``Link``."""
    wanted: np.ndarray
    """bool [rows]."""
    parent: np.ndarray
    """int32 [rows]: row of the transfer that this one forwards, -1 when the source owns the bytes."""
    fan: np.ndarray
    """int32 [rows]: number of the set of ranks to which the destination forwards these bytes, -1 for none. Equal sets
    have equal numbers throughout a plan."""
    numel: np.ndarray
    """int64 [rows], elements of the region."""

    def __len__(self) -> int:
        return len(self.src)

    @overload
    def __getitem__(self, row: int) -> Transfer: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, row: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(row, slice):
            return tuple(self[i] for i in range(*row.indices(len(self))))
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        region = Region(tuple(self.start[row].tolist()), tuple(self.stop[row].tolist()))
        src, dst, hop, link = (int(column[row]) for column in (self.src, self.dst, self.hop, self.link))
        return Transfer(src, dst, region, hop, Link(link), bool(self.wanted[row]))

    def __iter__(self) -> Iterator[Transfer]:
        return (self[row] for row in range(len(self)))
