"""Runs a bound program over a point-to-point backend in one fixed order of groups, equal on every rank.

Group g holds hop 0 of bucket g and hop 1 of bucket g - 1, so that what enters a domain is fanned out while the next
bucket crosses the network; later hops of bucket g - 1 follow in groups of their own. Ranks without a message in a group
skip it. Since the order is the same everywhere, backends that match calls by order (NCCL) cannot deadlock.
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


Parts = Callable[[BoundMessage, int, int, bool], list[torch.Tensor]]
"""``parts(message, bucket, index, sending)``: the message's memory, cut as its other end has it."""


def hops_of(plan: Plan) -> int:
    """The highest hop of any transfer."""
    return max((int(group.transfers.hop.max(initial=0)) for group in plan.groups), default=0)


def run_lockstep(binding: Binding, backend: Backend, parts: Parts, hops: int) -> WireStats:
    """One refit over ``binding``'s buckets; ``hops`` as ``hops_of`` says. Raises what the backend raises."""
    stats, buckets = WireStats(), binding.buckets
    clock = _Clock(stats)
    ready: int | None = None
    for number in range(len(buckets) + min(hops, 1)):
        if ready is not None and hops:
            _finish(binding, buckets[ready], clock)
            ready = None
        if number < len(buckets):
            with clock("pack"):
                buckets[number].pack.run()
                buckets[number].local.run()
            _count_local(stats, buckets[number])
        groups = [[(number, 0), (number - 1, 1)], *([(number - 1, hop)] for hop in range(2, hops + 1))]
        for group in groups:
            present = [(b, hop) for b, hop in group if 0 <= b < len(buckets) and hop <= hops]
            handle = _post(buckets, present, backend, parts, stats)
            if ready is not None:
                _finish(binding, buckets[ready], clock)
                ready = None
            if handle is not None:
                with clock("domain" if all(hop for _, hop in present) else "network"):
                    backend.wait(handle)
        ready = number - min(hops, 1)
        ready = ready if 0 <= ready < len(buckets) else None
    if ready is not None:
        _finish(binding, buckets[ready], clock)
    with clock("wait"):
        backend.drain()
    return stats


def _post(
    buckets: tuple[BoundBucket, ...], group: list[tuple[int, int]], backend: Backend, parts: Parts, stats: WireStats
) -> object | None:
    sends: list[Part] = []
    recvs: list[Part] = []
    for number, hop in group:
        for sending, messages, posted, counts in (
            (True, buckets[number].sends, sends, stats.sent),
            (False, buckets[number].recvs, recvs, stats.received),
        ):
            for index, message in _of_hop(messages, hop):
                posted.extend((message.peer, run) for run in parts(message, number, index, sending))
                counts[message.link.name.lower()] += message.nbytes
                stats.messages += sending
    return backend.post(sends, recvs) if sends or recvs else None


def _of_hop(messages: list[BoundMessage], hop: int) -> Iterable[tuple[int, BoundMessage]]:
    return ((index, message) for index, message in enumerate(messages) if message.hop == hop)


def _count_local(stats: WireStats, bucket: BoundBucket) -> None:
    stats.sent["local"] += bucket.local_bytes
    stats.received["local"] += bucket.local_bytes


def _finish(binding: Binding, bucket: BoundBucket, clock: _Clock) -> None:
    with clock("unpack"):
        for message in bucket.recvs:
            message.unpack.run()
    if binding.sink is not None and (bucket.direct or bucket.whole):
        with clock("load"):
            binding.sink.arrived(bucket.direct, bucket.whole)


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
