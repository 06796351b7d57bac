"""Runs a bound program over a point-to-point backend in one fixed order of groups, equal on every rank.

Group g holds hop 0 of bucket g and hop 1 of bucket g - 1, so that what enters a domain is fanned out while the next
bucket crosses the network; later hops of bucket g - 1 follow in groups of their own. Ranks without a message in a group
skip it. Since the order is the same everywhere, backends that match calls by order (NCCL) cannot deadlock.

Two buckets are staged at a time. Without forwarding, the next bucket is packed and the last one unpacked while one is
exchanged. With it, both slots are in the group that is under way, so packing and unpacking take their turn between
groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from refit_transport.planning.plan import Plan
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import BoundBucket, BoundMessage

from .base import WireStats

Part = tuple[int, torch.Tensor]
"""A peer and the uint8 run of memory to send to, or receive from, it."""


class Backend(Protocol):
    """Point-to-point operations that complete in the background."""

    def post(self, sends: list[Part], recvs: list[Part]) -> object:
        """Start all operations of one group and return a handle."""

    def wait(self, handle: object) -> None:
        """Return once what follows may read the received bytes and overwrite the sent ones. Raises WireError."""

    def drain(self) -> None:
        """Return once everything is done on this rank, copies included. Raises WireError."""


Parts = Callable[[int, int, bool], list[torch.Tensor]]
"""``parts(bucket, index, sending)``: the memory of a message, cut as its other end has it."""


def hops_of(plan: Plan) -> int:
    """The highest hop of any transfer."""
    return max((int(group.transfers.hop.max(initial=0)) for group in plan.groups), default=0)


def groups_of(step: int, buckets: int, hops: int) -> list[list[tuple[int, int]]]:
    """The groups of a step, in order; each lists (bucket, hop)."""
    groups = [[(step, 0), (step - 1, 1)], *([(step - 1, hop)] for hop in range(2, hops + 1))]
    inside = [[(b, hop) for b, hop in group if 0 <= b < buckets and hop <= hops] for group in groups]
    return [group for group in inside if group]


def run_lockstep(binding: Binding, backend: Backend, parts: Parts, hops: int) -> WireStats:
    """One refit over ``binding``'s buckets; ``hops`` as ``hops_of`` says. Raises what the backend raises."""
    run = _Run(binding, backend, parts)
    behind = min(hops, 1)
    """Steps from a bucket's first group to its last."""
    run.pack(0)
    for step in range(len(binding.buckets) + behind):
        for number, group in enumerate(groups_of(step, len(binding.buckets), hops)):
            handle = run.post(group)
            if number == 0 and not behind:
                run.finish(step - 1)
                run.pack(step + 1)
            run.wait(handle, group)
        if behind:
            run.finish(step - behind)
            run.pack(step + 1)
    if not behind:
        run.finish(len(binding.buckets) - 1)
    run.drain()
    return run.stats


class _Run:
    """The steps of one refit on this rank, each timed and counted."""

    def __init__(self, binding: Binding, backend: Backend, parts: Parts) -> None:
        self._binding, self._backend, self._parts = binding, backend, parts
        self.stats = WireStats()
        self._clock = _Clock(self.stats)

    def _bucket(self, number: int) -> BoundBucket | None:
        return self._binding.buckets[number] if 0 <= number < len(self._binding.buckets) else None

    def pack(self, number: int) -> None:
        if (bucket := self._bucket(number)) is None:
            return
        with self._clock("pack"):
            bucket.pack.run()
            bucket.local.run()
        self.stats.sent["local"] += bucket.local_bytes
        self.stats.received["local"] += bucket.local_bytes

    def post(self, group: list[tuple[int, int]]) -> object | None:
        sends: list[Part] = []
        recvs: list[Part] = []
        for number, hop in group:
            bucket = self._binding.buckets[number]
            self._gather(bucket.sends, number, hop, sends, self.stats.sent, sending=True)
            self._gather(bucket.recvs, number, hop, recvs, self.stats.received, sending=False)
        return self._backend.post(sends, recvs) if sends or recvs else None

    def _gather(
        self,
        messages: list[BoundMessage],
        number: int,
        hop: int,
        posted: list[Part],
        counts: dict[str, int],
        *,
        sending: bool,
    ) -> None:
        for index, message in _of_hop(messages, hop):
            posted.extend((message.peer, run) for run in self._parts(number, index, sending))
            counts[message.link.name.lower()] += message.nbytes
            self.stats.messages += sending

    def wait(self, handle: object | None, group: list[tuple[int, int]]) -> None:
        if handle is not None:
            with self._clock("domain" if all(hop for _, hop in group) else "network"):
                self._backend.wait(handle)

    def finish(self, number: int) -> None:
        """Unpack a bucket that is complete, and say so to the engine."""
        if (bucket := self._bucket(number)) is None:
            return
        with self._clock("unpack"):
            for message in bucket.recvs:
                message.unpack.run()
        if self._binding.sink is not None and (bucket.direct or bucket.whole):
            with self._clock("load"):
                self._binding.sink.arrived(bucket.direct, bucket.whole)

    def drain(self) -> None:
        with self._clock("wait"):
            self._backend.drain()


def _of_hop(messages: list[BoundMessage], hop: int) -> Iterable[tuple[int, BoundMessage]]:
    return ((index, message) for index, message in enumerate(messages) if message.hop == hop)


class _Clock:
    """Adds the seconds of a block to a phase: ``with clock("pack"): ...``."""

    def __init__(self, stats: WireStats) -> None:
        self._seconds, self._phase, self._started = stats.seconds, "", 0.0

    def __call__(self, phase: str) -> _Clock:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + time.monotonic() - self._started
