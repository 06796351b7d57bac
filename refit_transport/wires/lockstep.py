"""Runs a bound program over a point-to-point backend, in the order of actions that ``schedule`` gives.

Since the order is the same on every rank, backends that match calls by order (NCCL) cannot deadlock. Ranks without a
message in a group skip it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from refit_transport.planning.plan import Plan
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import BoundMessage

from .base import WireStats
from .schedule import Group, Pack, Post, Unpack, Wait, schedule

Part = tuple[int, torch.Tensor]
"""A peer and the uint8 run of memory to send to, or receive from, it."""


class Backend(Protocol):
    """Point-to-point operations that complete in the background."""

    in_order: bool
    """Whether a group begins on this rank only when all that were posted before it are through."""

    def post(self, sends: list[Part], recvs: list[Part]) -> object:
        """Start all operations of one group and return a handle."""

    def wait(self, handle: object) -> None:
        """Return once what follows may read the received bytes and overwrite the sent ones. Raises WireError."""

    def packing(self, bucket: int) -> AbstractContextManager[None]:
        """Around the copies into the slot of ``bucket``: after what is unpacked from that slot, before what is posted
        from here on."""

    def unpacking(self, bucket: int) -> AbstractContextManager[None]:
        """Around the copies out of the slot of ``bucket``: after its packing and the groups that were waited for."""

    def drain(self) -> None:
        """Return once everything is done on this rank, copies included. Raises WireError."""


Parts = Callable[[int, int, bool], list[torch.Tensor]]
"""``parts(bucket, index, sending)``: the memory of a message, cut as its other end has it."""


def hops_of(plan: Plan) -> int:
    """The highest hop of any transfer."""
    return max((int(group.transfers.hop.max(initial=0)) for group in plan.groups), default=0)


def run_lockstep(binding: Binding, backend: Backend, parts: Parts, hops: int) -> WireStats:
    """One refit over ``binding``'s buckets; ``hops`` as ``hops_of`` says. Raises what the backend raises."""
    run = _Run(binding, backend, parts)
    for action in schedule(len(binding.buckets), hops, in_order=backend.in_order):
        match action:
            case Pack(bucket):
                run.pack(bucket)
            case Post(group):
                run.post(group)
            case Wait(group):
                run.wait(group)
            case Unpack(bucket):
                run.unpack(bucket)
    run.drain()
    return run.stats


class _Run:
    """The steps of one refit on this rank, each timed and counted."""

    def __init__(self, binding: Binding, backend: Backend, parts: Parts) -> None:
        self._binding, self._backend, self._parts = binding, backend, parts
        self.stats = WireStats()
        self._clock = PhaseClock(self.stats)
        self._posted: dict[Group, object] = {}

    def pack(self, number: int) -> None:
        bucket = self._binding.buckets[number]
        with self._clock("pack"), self._backend.packing(number):
            bucket.pack.run()
            bucket.local.run()
        self.stats.sent["local"] += bucket.local_bytes
        self.stats.received["local"] += bucket.local_bytes

    def post(self, group: Group) -> None:
        sends: list[Part] = []
        recvs: list[Part] = []
        for number, hop in group:
            bucket = self._binding.buckets[number]
            self._gather(bucket.sends, number, hop, sends, self.stats.sent, sending=True)
            self._gather(bucket.recvs, number, hop, recvs, self.stats.received, sending=False)
        if sends or recvs:
            self._posted[group] = self._backend.post(sends, recvs)

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

    def wait(self, group: Group) -> None:
        if (handle := self._posted.pop(group, None)) is not None:
            with self._clock("domain" if all(hop for _, hop in group) else "network"):
                self._backend.wait(handle)

    def unpack(self, number: int) -> None:
        """Unpack a bucket that is complete, and say so to the engine."""
        bucket = self._binding.buckets[number]
        with self._backend.unpacking(number):
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


class PhaseClock:
    """Adds the seconds of a block to a phase: ``with clock("pack"): ...``."""

    def __init__(self, stats: WireStats) -> None:
        self._seconds, self._phase, self._started = stats.seconds, "", 0.0

    def __call__(self, phase: str) -> PhaseClock:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + time.monotonic() - self._started
