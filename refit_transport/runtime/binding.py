"""Binds a program to live tensors: resolves pieces to views, lays out staging, and prepares every copy of a refit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from refit_transport.engines.base import WeightSink
from refit_transport.layout.alignment import PAGE, aligned
from refit_transport.planning.plan import Plan
from refit_transport.planning.program import BucketProgram, Message, Program
from refit_transport.trainers.base import WeightSource

from .arena import Arena, Arrival
from .bucket_layout import BucketLayout, lay_out
from .checksums import Checksums
from .pieces import Pieces
from .replay import BoundBucket, BoundMessage, Copies, Target
from .staging import SLOTS, Staging


def peers_of(program: Program) -> frozenset[int]:
    """The ranks that a program exchanges messages with: those that its wire has to reach."""
    return frozenset(m.peer for bucket in program.buckets for m in (*bucket.sends, *bucket.recvs))


class Binding:
    """A program on this rank's tensors. Made once per plan; ``begin`` opens each refit, the wire binds and replays.

    ``source`` is needed when the rank sends data of its own, ``sink`` when it stores any. With ``checksums`` every
    message is summed after it was packed, and after it was stored; no wire has to know of it.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        source: WeightSource | None = None,
        sink: WeightSink | None = None,
        *,
        checksums: Checksums | None = None,
    ) -> None:
        self.plan, self.program, self.source, self.sink = plan, program, source, sink
        self.checksums = checksums
        self.buckets: tuple[BoundBucket, ...] = ()
        self.memory: torch.Tensor | None = None
        """All staging of this rank, uint8; None when nothing is staged."""
        self.generation = 0
        """Grows at every bind; peers that read this rank's staging must then learn its layout anew."""
        self.stale = True
        self.wire_bytes = 0
        """Memory that the wire holds besides what it binds here."""
        self._staging: Staging | None = None
        self._pieces = Pieces(plan, program)
        self._arena: Arena | None = None

    @property
    def rank(self) -> int:
        return self.program.rank

    @property
    def peak_extra_bytes(self) -> int:
        """Memory that refits take on this rank besides the weights: staging and whole tensors."""
        staged = 0 if self.memory is None else self.memory.numel()
        return staged + (0 if self._arena is None else self._arena.nbytes) + self.wire_bytes

    def begin(self, version: int) -> None:
        """Open a refit on the source and the sink. Views are taken again at the next ``bind`` if either moved."""
        if self.source is not None and self.source.refresh():
            self.stale = True
        if self.sink is not None and self.sink.begin(version):
            self.stale = True
        if self.checksums is not None:
            self.checksums.begin()

    def bind(self, staging: Staging) -> None:
        """Take views and lay out staging; does nothing while neither the views nor ``staging`` changed. Memory is kept
        when the layout still fits. Raises ValueError for a tensor that is not as planned."""
        if not self.stale and staging is self._staging:
            return
        if staging is not self._staging:
            self.memory = self._arena = None
        self._staging = staging
        arrivals, completed = self._arrivals()
        if self._arena is None:
            self._arena = Arena(arrivals, staging.arena)
        views = self._source_view, self._target_view
        layouts = [lay_out(self._pieces, bucket, staging, *views) for bucket in self.program.buckets]
        slot_bytes = aligned(max((layout.nbytes for layout in layouts), default=0), PAGE)
        if self.memory is None or self.memory.numel() < slot_bytes * SLOTS:
            self.memory = None
            self.memory = staging.allocate(slot_bytes * SLOTS) if slot_bytes else None
        self.buckets = tuple(
            self._bound(bucket, layout, (number % SLOTS) * slot_bytes, completed[number])
            for number, (bucket, layout) in enumerate(zip(self.program.buckets, layouts, strict=True))
        )
        self.generation += 1
        self.stale = False

    def attach(self, bucket: int, index: int, segments: Sequence[torch.Tensor]) -> None:
        """Say where the sender of ``buckets[bucket].recvs[index]`` stages that message. ``segments``: uint8 tensors
        over its memory whose concatenation is the message; no piece spans two of them."""
        bound, message = self.buckets[bucket].recvs[index], self.program.buckets[bucket].recvs[index]
        starts = [0, *accumulate(s.numel() for s in segments)]
        if starts[-1] != message.nbytes:
            raise ValueError(
                f"bucket {bucket}: rank {message.peer} stages {starts[-1]} bytes for rank {self.rank}, "
                f"the program expects {message.nbytes}; the two run different plans"
            )
        if bound.relayed:
            (run,) = bound.segments
            bound.fetch = Copies([run[a:b] for a, b in pairwise(starts)], list(segments))
            return
        bound.unpack = Copies()
        rows = range(message.first, message.last)

        def run_of(row: int) -> torch.Tensor:
            offset = self._pieces.offset[row]
            number = bisect_right(starts, offset, hi=len(segments)) - 1
            return segments[number][offset - starts[number] :][: self._pieces.nbytes[row]]

        for row in rows:
            if self._pieces.wanted[row]:
                bound.unpack.add(self._target_view(row), self._typed(run_of(row), row))
        if self.checksums is not None:
            bound.unpack.then = self.checksums.take(rows, run_of)

    def _source_view(self, row: int) -> torch.Tensor:
        if self.source is None:
            raise ValueError(f"rank {self.rank} has to send {self._pieces.traits(row).name} but has no weight source")
        return self._pieces.source_view(self.source, row)

    def _target_view(self, row: int) -> Target:
        traits = self._pieces.traits(row)
        if traits.whole:
            return self._arena.tensors[self._pieces.parameter[row]][self._pieces.region(row).slices()]
        if self.sink is None:
            raise ValueError(f"rank {self.rank} has to store {traits.name} but has no weight sink")
        if traits.name in self.sink.transient:
            return partial(self._pieces.sink_view, self.sink, row)
        return self._pieces.sink_view(self.sink, row)

    def _arrivals(self) -> tuple[dict[int, Arrival], list[tuple[list[str], list[int]]]]:
        """Arrival of every whole tensor, and per bucket what is complete after it: direct names, whole parameters."""
        arriving: dict[int, Arrival] = {}
        for number, bucket in enumerate(self.program.buckets):
            spans = [(m.first, m.last) for m in bucket.recvs] + [bucket.local]
            for row in (row for span in spans for row in range(*span)):
                if self._pieces.wanted[row]:
                    p = self._pieces.parameter[row]
                    life = arriving.get(p)
                    if life is None or life.last != number:
                        first = number if life is None else life.first
                        arriving[p] = Arrival(first, number, self._pieces.traits(row))
        completed: list[tuple[list[str], list[int]]] = [([], []) for _ in self.program.buckets]
        for p, life in arriving.items():
            completed[life.last][life.traits.whole].append(p if life.traits.whole else life.traits.name)
        return {p: life for p, life in arriving.items() if life.traits.whole}, completed

    def _bound(
        self, bucket: BucketProgram, layout: BucketLayout, slot: int, completed: tuple[list[str], list[int]]
    ) -> BoundBucket:
        recv_of_row: dict[int, int] = {}
        recvs = []
        for index, message in enumerate(bucket.recvs):
            recv_of_row.update((row, index) for row in range(message.first, message.last))
            recvs.append(self._bound_recv(index, message, layout, slot))
        sends = [self._bound_send(i, message, layout, slot, recv_of_row) for i, message in enumerate(bucket.sends)]
        pack = Copies([t for m in sends for t in m.pack.dst], [t for m in sends for t in m.pack.src])
        if self.checksums is not None:
            pack.then = self._sum_sends(bucket, sends, layout, slot)
        local, rows = Copies(), range(*bucket.local)
        for row in rows:
            local.add(self._target_view(row), self._source_view(row))
        names, whole = completed
        tensors = [(self.plan.parameters[p].name, self._arena.tensors[p]) for p in whole]
        local_bytes = sum(self._pieces.nbytes[row] for row in rows)
        return BoundBucket(sends, recvs, pack, local, local_bytes, tuple(names), tensors)

    def _bound_recv(self, index: int, m: Message, layout: BucketLayout, slot: int) -> BoundMessage:
        in_place, relayed = index in layout.in_place, layout.in_place.get(index, False)
        rows = range(m.first, m.last)
        segments = [] if in_place and not relayed else self._segments(rows, layout, slot)
        bound = BoundMessage(m.peer, m.hop, m.link, m.nbytes, segments, in_place=in_place, relayed=relayed)
        for row in rows:
            if row in layout.staged and self._pieces.wanted[row]:
                bound.unpack.add(layout.views[row], self._staged(row, layout, slot))
        if self.checksums is not None and (relayed or not in_place):
            bound.unpack.then = self.checksums.take(rows, lambda row: self._run(row, layout, slot))
        return bound

    def _bound_send(
        self, index: int, m: Message, layout: BucketLayout, slot: int, recv_of_row: dict[int, int]
    ) -> BoundMessage:
        origins = [self._pieces.origin[row] for row in range(m.first, m.last)]
        rows = [row if origin < 0 else origin for row, origin in enumerate(origins, start=m.first)]
        needs = tuple(sorted({recv_of_row[origin] for origin in origins if origin >= 0}))
        bound = BoundMessage(m.peer, m.hop, m.link, m.nbytes, self._segments(rows, layout, slot), needs=needs)
        bound.shares = tuple(sorted(layout.shares[index] - {index}))
        for row in layout.packed[index]:
            bound.pack.add(self._staged(row, layout, slot), layout.views[row])
        return bound

    def _sum_sends(
        self, bucket: BucketProgram, sends: Sequence[BoundMessage], layout: BucketLayout, slot: int
    ) -> Callable[[], None] | None:
        """Sums each message's own data once it is packed, data that several carry with the first. Returns what sums all
        of the bucket, for wires that pack it at once."""
        first_of: dict[tuple[int, int], int] = {}
        for message, bound in zip(bucket.sends, sends, strict=True):
            summed = []
            for row in range(message.first, message.last):
                if self._pieces.origin[row] < 0:
                    where = self._run(row, layout, slot).data_ptr(), self._pieces.nbytes[row]
                    first = first_of.setdefault(where, row)
                    self.checksums.same_as(row, first)
                    if first == row:
                        summed.append(row)
            bound.pack.then = self.checksums.take(summed, lambda row: self._run(row, layout, slot))
        return self.checksums.take(list(first_of.values()), lambda row: self._run(row, layout, slot))

    def _segments(self, rows: Sequence[int], layout: BucketLayout, slot: int) -> list[torch.Tensor]:
        """The bytes of ``rows`` in order, as few runs of memory as there are."""
        segments: list[torch.Tensor] = []
        start = stop = -1
        for row in rows:
            if row in layout.direct:
                if stop > start:
                    segments.append(self.memory[start:stop])
                segments.append(layout.direct[row])
                start = stop = -1
                continue
            at = slot + layout.staged[row]
            if at != stop:
                if stop > start:
                    segments.append(self.memory[start:stop])
                start = at
            stop = at + self._pieces.nbytes[row]
        if stop > start:
            segments.append(self.memory[start:stop])
        return segments

    def _staged(self, row: int, layout: BucketLayout, slot: int) -> torch.Tensor:
        return self._typed(self._run(row, layout, slot), row)

    def _run(self, row: int, layout: BucketLayout, slot: int) -> torch.Tensor:
        """The bytes of a row, live or staged."""
        if row in layout.direct:
            return layout.direct[row]
        start = slot + layout.staged[row]
        return self.memory[start : start + self._pieces.nbytes[row]]

    def _typed(self, raw: torch.Tensor, row: int) -> torch.Tensor:
        """The bytes of a row in its wire dtype and shape."""
        return raw.view(self._pieces.traits(row).wire).view(self._pieces.region(row).shape)
