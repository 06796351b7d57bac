"""Decides, for one bucket, which pieces are staged and where, and which travel straight from or into live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from refit_transport.layout.alignment import aligned
from refit_transport.layout.region import Region
from refit_transport.planning.program import BucketProgram, Message

from .pieces import Pieces
from .replay import Target
from .staging import Staging


@dataclass(slots=True)
class BucketLayout:
    """Where the pieces of a bucket are, by row of the piece table. Offsets are relative to the bucket's slot."""

    nbytes: int = 0
    """Staging that the bucket takes, in plus out."""
    staged: dict[int, int] = field(default_factory=dict)
    """Offset of every staged row. Rows of equal own data share one."""
    direct: dict[int, torch.Tensor] = field(default_factory=dict)
    """Live bytes (uint8, 1-D) of every row that is not staged."""
    views: dict[int, Target] = field(default_factory=dict)
    """Live tensor of every row that is packed or unpacked here."""
    packed: list[list[int]] = field(default_factory=list)
    """Rows to pack, by sent message; data that several messages carry is packed for the first of them."""
    shares: list[set[int]] = field(default_factory=list)
    """By sent message: the earlier messages whose packed data it carries as well."""
    in_place: dict[int, bool] = field(default_factory=dict)
    """Index into ``recvs`` of messages that are read where their sender staged them -> whether they are relayed."""


def live_bytes(view: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, 1-D."""
    return view.reshape(-1).view(torch.uint8)


class _Layouter:
    def __init__(
        self,
        pieces: Pieces,
        bucket: BucketProgram,
        staging: Staging,
        source: Callable[[int], torch.Tensor],
        target: Callable[[int], Target],
    ) -> None:
        self.pieces, self.bucket, self.staging = pieces, bucket, staging
        self.source, self.target = source, target
        self.out = BucketLayout()
        self.forwarded: set[int] = set()
        self.forwarded_in_place: set[int] = set()
        self._own_runs: dict[tuple[int, Region, torch.dtype], tuple[int, int]] = {}
        for message in bucket.sends:
            rows = {pieces.origin[row] for row in range(message.first, message.last)} - {-1}
            self.forwarded |= rows
            if message.peer in staging.read_by:
                self.forwarded_in_place |= rows

    def receive(self, index: int, message: Message) -> None:
        out, rows = self.out, range(message.first, message.last)
        for row in rows:
            if self.pieces.wanted[row]:
                out.views[row] = self.target(row)
        if message.peer in self.staging.reads:
            out.in_place[index] = relayed = any(row in self.forwarded for row in rows)
            if relayed:
                self._stage(rows)
            return
        staged = []
        for row in rows:
            view = out.views.get(row)
            if view is not None and row not in self.forwarded_in_place and self._goes_direct(row, view):
                out.direct[row] = live_bytes(view)
            else:
                staged.append(row)
        self._stage(staged)

    def send(self, index: int, message: Message) -> None:
        staged: list[int] = []
        self.out.packed.append(staged)
        self.out.shares.append(set())
        twins: dict[int, int] = {}
        for row in range(message.first, message.last):
            if self.pieces.origin[row] >= 0:
                continue
            view = self.source(row)
            if message.peer not in self.staging.read_by and self._goes_direct(row, view):
                self.out.direct[row] = live_bytes(view)
                continue
            run = (self.pieces.parameter[row], self.pieces.region(row), self.pieces.traits(row).wire)
            first, packer = self._own_runs.setdefault(run, (row, index))
            if first != row:
                twins[row] = first
                self.out.shares[index].add(packer)
                continue
            self.out.views[row] = view
            staged.append(row)
        self._stage(staged)
        for row, first in twins.items():
            self.out.staged[row] = self.out.staged[first]

    def _goes_direct(self, row: int, view: Target) -> bool:
        least = self.staging.direct_bytes
        return (
            least is not None
            and isinstance(view, torch.Tensor)
            and self.pieces.nbytes[row] >= least
            and view.is_contiguous()
            and view.dtype == self.pieces.traits(row).wire
        )

    def _stage(self, rows: Iterable[int]) -> None:
        """Lay rows one after the other. Falling item sizes keep each of them aligned."""
        at = self.out.nbytes
        for row in rows:
            self.out.staged[row] = at
            at += self.pieces.nbytes[row]
        self.out.nbytes = aligned(at)


def lay_out(
    pieces: Pieces,
    bucket: BucketProgram,
    staging: Staging,
    source: Callable[[int], torch.Tensor],
    target: Callable[[int], Target],
) -> BucketLayout:
    """Lay out one bucket. ``source`` and ``target`` give the live tensor of a row on either side; a ``target`` that is
    not there yet is staged."""
    layouter = _Layouter(pieces, bucket, staging, source, target)
    for index, message in enumerate(bucket.recvs):
        layouter.receive(index, message)
    for index, message in enumerate(bucket.sends):
        layouter.send(index, message)
    return layouter.out
