"""The NCCL M2N wire: what the library can express goes as its collective, the rest point to point, in one fixed order.

A call of M2N cannot be interrupted: it has no deadline, and `abort` does not reach its waits on the device. So the host
never waits behind one without looking: calls are queued in a helper thread, their ends are looked at as marks, and an
engine loads only what is there, on a stream on which no later call is queued. When a peer is lost this wire raises its
error in time; the call stays on the GPU, and the process has to be restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from refit_transport.engines.base import WeightSink
from refit_transport.planning import compile_program
from refit_transport.planning.m2n import (
    Choice,
    Stack,
    call_limit,
    communicator_order,
    make_stacks,
    wires_by_parameter,
    without_m2n,
)
from refit_transport.runtime.binding import Binding

from .base import Peer, WireError, WireStats
from .blame import Register
from .helper_thread import NEWS_SECONDS, HelperThread, Interrupted, heard
from .lockstep import PhaseClock
from .m2n_choice import Holding, agree_on_wires
from .m2n_library import Library
from .m2n_stack import BoundStack, bind_stacks
from .nccl import NcclWire, abort_in_background
from .nccl_group import GroupMaker, make_group
from .nccl_queue import CudaQueue, Mark, Queue
from .watch import Watch

log = logging.getLogger("refit_transport")

_POLL = 0.001


class M2nWire:
    """One rank's end, on the current CUDA device of the thread that makes it. A communicator for M2N, sources first,
    beside that of the NCCL wire; the two never run at once, and stage in the same memory."""

    name = "nccl_m2n"

    def __init__(
        self,
        network_interface: str | None = None,
        queue: Queue | None = None,
        group_maker: GroupMaker = make_group,
        library: Callable[[], Library] = Library,
    ) -> None:
        self._queue = queue or CudaQueue()
        self._loading = self._queue.side_stream()
        self._p2p = NcclWire(network_interface, self._queue, group_maker, staging_memory=self._memory)
        self._make_library = library
        self._library: Library | None = None
        self._place: dict[int, int] = {}
        self._peers: dict[int, Peer] = {}
        self._rank = -1
        self._helper = HelperThread("refit-m2n")
        self._bound: Binding | None = None
        self._choices: list[Choice] = []
        self._calls: list[Stack] = []
        self._stack_bytes = 0
        """Of the largest call on a rank."""
        self._rest: Binding | None = None
        self._stacks: tuple[BoundStack, ...] = ()
        self._held: torch.Tensor | None = None

    def listen(self, rank: int) -> dict[str, object]:
        """As the NCCL wire does."""
        return self._p2p.listen(rank)

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        self._p2p.connect(rank, peers, deadline)
        self._rank, self._peers = rank, {peer.rank: peer for peer in peers}
        by_role = {role: [p.rank for p in peers if p.role == role] for role in ("trainer", "engine")}
        self._place = communicator_order(by_role["trainer"], by_role["engine"])
        try:
            self._library = self._make_library()
            self._helper.call(lambda: self._form(deadline), deadline, lambda: None)
        except (Interrupted, RuntimeError) as error:
            self.close()
            raise WireError(f"M2N: rank {rank} could not form the communicator: {error}", phase="connect") from error

    def _form(self, deadline: float) -> None:
        store, place = self._p2p.store("m2n", deadline), self._place[self._rank]
        if place == 0:
            store.set("id", self._library.new_id().hex())
        store.wait(["id"], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        unique_id = bytes.fromhex(store.get("id").decode())
        with self._queue.on(self._queue.stream()):
            self._library.connect(unique_id, place, len(self._place))

    def wires_by_parameter(self) -> dict[str, tuple[str, str]]:
        """Parameter name to ``nccl_m2n`` or ``nccl`` and the reason; known once the first refit began."""
        return wires_by_parameter(self._bound.plan, self._choices) if self._bound is not None else {}

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """See ``Wire.run``. The phase ``m2n`` is the time that calls take to be queued and to end."""
        if self._library is None:
            raise WireError("M2N: the wire is not connected", phase="run")
        if binding.checksums is not None:
            log.warning("wire nccl_m2n: `verify: checksum` sums messages, which M2N has none of; all goes over nccl")
            return self._p2p.run(binding, version, deadline, failed)
        with Watch(failed, deadline, self._release) as watch:
            calls = _Calls(self, version, deadline, watch)
            self._prepare(binding, version, deadline, calls)
            calls.make(self._stacks, binding.sink)
            try:
                rest = self._p2p.exchange(self._rest, version, deadline, watch)
            except WireError:
                self.close()
                raise
        binding.wire_bytes = self._staged_bytes()
        return _sum(rest, calls.stats)

    def _prepare(self, binding: Binding, version: int, deadline: float, calls: _Calls) -> None:
        if self._bound is not binding:
            store = self._p2p.store(f"choice {version}", deadline)
            holding = Holding.of(binding)
            self._choices = calls.watched(
                lambda: agree_on_wires(binding.plan, holding, self._rank, self._place, store, deadline),
                "agreeing on the wires",
            )
            plan = without_m2n(binding.plan, self._choices)
            self._calls = make_stacks(binding.plan, self._choices)
            self._stack_bytes = max((call.geometry.nbytes * len(call.members) for call in self._calls), default=0)
            self._rest = Binding(plan, compile_program(plan, self._rank), binding.source, binding.sink)
            self._bound, binding.stale = binding, True
            if self._calls:
                limit = call_limit(binding.plan, self._choices)
                calls.watched(lambda: self._library.open(limit), "opening M2N")
        if binding.stale:
            self._bind(binding)
            binding.stale = False
            binding.generation += 1

    def _bind(self, binding: Binding) -> None:
        """The rest first: it may need more of the memory than the calls do."""
        self._stacks, self._rest.stale = (), True
        self._rest.bind(self._p2p.staging)
        pool = self._memory(self._stack_bytes) if self._stack_bytes else None
        self._stacks = bind_stacks(binding, self._calls, self._place[self._rank], pool)

    def _memory(self, nbytes: int) -> torch.Tensor:
        """uint8: the beginning of the one memory in which calls are stacked and the rest is staged, one after the
        other."""
        if self._held is None or self._held.numel() < nbytes:
            self._held = None
            self._held = self._queue.memory(max(nbytes, self._stack_bytes))
        return self._held[:nbytes]

    def _staged_bytes(self) -> int:
        """Of the rest, of the stacks where they are larger, and of the library for its own staging."""
        held = 0 if self._held is None else self._held.numel()
        rest = 0 if self._rest.memory is None else self._rest.memory.numel()
        return self._rest.peak_extra_bytes + held - rest + self._library.staged_bytes

    def _release(self) -> None:
        self._p2p.release()
        if self._library is not None:
            abort_in_background(self._library.abort)

    def close(self, lingering: bool = False) -> None:
        """Release both communicators, as far as they can be."""
        self._p2p.close(lingering)
        if self._library is not None:
            abort_in_background(self._library.close)
        self._helper.close()
        self._library = self._bound = self._rest = self._held = None
        self._stacks = ()


class _Calls:
    """The calls of one refit."""

    def __init__(self, wire: M2nWire, version: int, deadline: float, watch: Watch) -> None:
        self._wire, self._queue, self._deadline, self._watch = wire, wire._queue, deadline, watch
        self._register = Register(wire._p2p.store("blame", deadline), wire._rank, version)
        self._stuck = False
        """Whether a call may be under way on the device."""
        self.stats = WireStats()
        self._clock = PhaseClock(self.stats)

    def make(self, stacks: Sequence[BoundStack], sink: WeightSink | None) -> None:
        """All calls in order; while the engine loads one the next is under way."""
        begun = self._queue.mark()
        with self._queue.on(self._wire._loading):
            self._queue.follow(begun)
        before: tuple[BoundStack, Mark] | None = None
        for stack in stacks:
            end = self._queued(stack)
            if before is not None:
                self._finish(*before, sink)
            before = stack, self._unpacked(stack, end)
        if before is not None:
            self._finish(*before, sink)
        with self._queue.on(self._wire._loading):
            loaded = self._queue.mark()
        self._queue.follow(loaded)
        self._stuck = False

    def _queued(self, stack: BoundStack) -> Mark:
        """Queue one call, and the copies before it."""
        stream = self._queue.stream()

        def call() -> None:
            with self._queue.on(stream):
                self._wire._library.reshard(stack.geometry, stack.members, stack.source, stack.sink, stream)

        with self._clock("pack"):
            stack.pack.run()
        self._stuck = True
        with self._clock("m2n"):
            self.watched(call, _described(stack))
        return self._queue.mark()

    def _unpacked(self, stack: BoundStack, end: Mark) -> Mark:
        """Queue the copies after a call. The next call receives into the memory that they read."""
        with self._clock("unpack"), self._queue.on(self._wire._loading):
            self._queue.follow(end)
            stack.unpack.run()
            mark = self._queue.mark()
        self._queue.follow(mark)
        return mark

    def _finish(self, stack: BoundStack, end: Mark, sink: WeightSink | None) -> None:
        with self._clock("m2n"):
            while not end.query():
                if self._watch.news() is not None or time.monotonic() > self._deadline:
                    raise self._failure("the deadline passed", _described(stack))
                time.sleep(_POLL)
            if self._watch.released:
                raise self._failure("the deadline passed", _described(stack))
        if stack.sink is not None and sink is not None:
            with self._clock("load"), self._queue.on(self._wire._loading):
                sink.arrived(stack.names, [])
        for mine, moved in ((self.stats.sent, stack.counts.sent), (self.stats.received, stack.counts.received)):
            for link, nbytes in moved.items():
                mine[link] += nbytes
        self.stats.messages += stack.source is not None

    def watched(self, function: Callable[[], object], what: str) -> object:
        """The result of ``function``, made in the helper thread."""
        try:
            return self._wire._helper.call(function, self._deadline, self._watch.news)
        except Interrupted as gave_up:
            raise self._failure(str(gave_up), what) from None
        except WireError:
            self._wire.close()
            raise
        except Exception as error:
            heard(self._watch.news, NEWS_SECONDS)
            raise self._failure(f"{type(error).__name__}: {error}", what) from error

    def _failure(self, cause: str, what: str) -> WireError:
        """What another rank reported, or who holds up this call, which every rank makes together."""
        wire, news = self._wire, self._watch.news()
        others = set(wire._place) - {wire._rank}
        self._register.give_up(others)
        culprit = None if news is not None else self._register.culprit(others)
        wire.close(lingering=True)
        hint = "; a call of NCCL M2N may still wait on the GPU, restart this process" if self._stuck else ""
        if news is not None:
            return WireError(news + hint, phase="m2n")
        peer = "all other ranks" if culprit is None else str(wire._peers[culprit])
        return WireError(f"M2N: {cause} in {what}, waiting for {peer}{hint}", peer=culprit, phase="m2n")


def _described(stack: BoundStack) -> str:
    return f"the call of {stack.members} parameters from {stack.names[0]} on"


def _sum(*stats: WireStats) -> WireStats:
    total = WireStats(messages=sum(s.messages for s in stats))
    for one in stats:
        for mine, theirs in ((total.sent, one.sent), (total.received, one.received), (total.seconds, one.seconds)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) + value
    return total
