"""The NCCL M2N wire: what the library can express goes as its collective, the rest point to point, in one fixed order.

M2N cannot be interrupted: it has no deadline, and `abort` does not reach its waits. When a peer is lost in the middle
of a call this wire raises its error in time all the same, but the call stays on the GPU: the process has to be
restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from refit_transport.planning import compile_program
from refit_transport.planning.m2n import (
    Choice,
    call_limit,
    communicator_order,
    make_stacks,
    wires_by_parameter,
    without_m2n,
)
from refit_transport.planning.program import Program
from refit_transport.runtime.binding import Binding

from .base import Peer, WireError, WireStats
from .helper_thread import NEWS_SECONDS, HelperThread, Interrupted, heard
from .m2n_choice import agree_on_wires
from .m2n_library import Library
from .m2n_stack import BoundStack, bind_stacks
from .nccl import NcclWire, abort_in_background
from .nccl_group import GroupMaker, make_group
from .nccl_queue import CudaQueue, Queue
from .watch import Watch

log = logging.getLogger("refit_transport")


class M2nWire:
    """One rank's end, on the current CUDA device of the thread that makes it. A communicator for M2N, sources first,
    beside that of the NCCL wire; the two never run at once."""

    name = "nccl_m2n"

    def __init__(
        self,
        network_interface: str | None = None,
        queue: Queue | None = None,
        group_maker: GroupMaker = make_group,
        library: Callable[[], Library] = Library,
    ) -> None:
        self._queue = queue or CudaQueue()
        self._p2p = NcclWire(network_interface, self._queue, group_maker)
        self._make_library = library
        self._library: Library | None = None
        self._place: dict[int, int] = {}
        self._rank = -1
        self._helper = HelperThread("refit-m2n")
        self._bound: Binding | None = None
        self._choices: list[Choice] = []
        self._rest: Binding | None = None
        self._stacks: tuple[BoundStack, ...] = ()
        self._pool: torch.Tensor | None = None
        self._planned = WireStats()
        """What the plan says of the part that M2N carries: the library does not count."""
        self._in_call = False

    def listen(self, rank: int) -> dict[str, object]:
        """As the NCCL wire does."""
        return self._p2p.listen(rank)

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        self._p2p.connect(rank, peers, deadline)
        self._rank = rank
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
        """See ``Wire.run``. The phase ``m2n`` is the time in which its calls are queued."""
        if self._library is None:
            raise WireError("M2N: the wire is not connected", phase="run")
        if binding.checksums is not None:
            log.warning("wire nccl_m2n: `verify: checksum` sums messages, which M2N has none of; all goes over nccl")
            return self._p2p.run(binding, version, deadline, failed)
        with Watch(failed, deadline, self._release) as watch:
            self._prepare(binding, version, deadline, watch)
            stats = WireStats()
            for stack in self._stacks:
                self._reshard(stack, binding, deadline, watch, stats)
            try:
                rest = self._p2p.exchange(self._rest, version, deadline, watch)
            except WireError as error:
                raise self._failure(str(error), error.phase, error.peer) from error
        self._in_call = False
        binding.wire_bytes = self._rest.peak_extra_bytes + self._staged_bytes(binding)
        return _sum(rest, self._planned, stats)

    def _prepare(self, binding: Binding, version: int, deadline: float, watch: Watch) -> None:
        if self._bound is not binding:
            store = self._p2p.store(f"choice {version}", deadline)
            self._choices = self._call(
                lambda: agree_on_wires(binding, self._rank, list(self._place), self._place, store, deadline),
                deadline,
                watch,
                "agreeing on the wires",
            )
            plan = without_m2n(binding.plan, self._choices)
            program = compile_program(plan, self._rank)
            self._rest = Binding(plan, program, binding.source, binding.sink)
            self._planned = _difference(counts_of(binding.program), counts_of(program))
            self._bound, binding.stale = binding, True
            self._call(lambda: self._library.open(call_limit(binding.plan)), deadline, watch, "opening M2N")
        if binding.stale:
            self._bind(binding)
            self._rest.stale, binding.stale = True, False
            binding.generation += 1

    def _bind(self, binding: Binding) -> None:
        stacks = make_stacks(binding.plan, self._choices)
        if self._pool is None:
            nbytes = max((s.geometry.nbytes * len(s.members) for s in stacks), default=0)
            self._pool = self._queue.memory(nbytes) if nbytes else None
        self._stacks = bind_stacks(binding, stacks, self._place[self._rank], self._pool)

    def _staged_bytes(self, binding: Binding) -> int:
        """Of the stacks, and of the library for its own staging."""
        return 0 if self._pool is None else self._pool.numel() + call_limit(binding.plan)

    def _reshard(self, stack: BoundStack, binding: Binding, deadline: float, watch: Watch, stats: WireStats) -> None:
        """Queue one call with the copies around it."""
        clock = time.monotonic()
        stack.pack.run()
        stats.seconds["pack"] = stats.seconds.get("pack", 0.0) + time.monotonic() - clock
        clock, stream = time.monotonic(), self._queue.stream()

        def call() -> None:
            with self._queue.on(stream):
                self._library.reshard(stack.geometry, stack.members, stack.source, stack.sink, stream)

        self._in_call = True
        self._call(call, deadline, watch, f"M2N call of {stack.members} parameters from {stack.names[0]} on")
        stats.seconds["m2n"] = stats.seconds.get("m2n", 0.0) + time.monotonic() - clock
        clock = time.monotonic()
        stack.unpack.run()
        stats.seconds["unpack"] = stats.seconds.get("unpack", 0.0) + time.monotonic() - clock
        if stack.sink is not None and binding.sink is not None:
            binding.sink.arrived(stack.names, [])

    def _call(self, function: Callable[[], object], deadline: float, watch: Watch, what: str) -> object:
        try:
            return self._helper.call(function, deadline, watch.news)
        except Interrupted as gave_up:
            raise self._failure(gave_up.news or f"M2N: {gave_up} in {what}") from None
        except WireError:
            raise
        except Exception as error:
            news = heard(watch.news, NEWS_SECONDS)
            raise self._failure(news or f"M2N: {what} failed: {type(error).__name__}: {error}") from error

    def _failure(self, text: str, phase: str = "exchange", peer: int | None = None) -> WireError:
        hint = "; a call of NCCL M2N may still wait on the GPU, restart this process" if self._in_call else ""
        self.close()
        return WireError(text + hint, peer=peer, phase=phase)

    def _release(self) -> None:
        self._p2p.release()
        if self._library is not None:
            abort_in_background(self._library.abort)

    def close(self) -> None:
        """Release both communicators, as far as they can be."""
        self._p2p.close()
        if self._library is not None:
            abort_in_background(self._library.close)
        self._helper.close()
        self._library = self._bound = self._rest = None
        self._stacks = ()


def counts_of(program: Program) -> WireStats:
    """What a program sends and receives by link class, and how many messages."""
    stats = WireStats()
    for bucket in program.buckets:
        for message in bucket.sends:
            stats.sent[message.link.name.lower()] += message.nbytes
            stats.messages += 1
        for message in bucket.recvs:
            stats.received[message.link.name.lower()] += message.nbytes
        local = int(program.pieces.nbytes[slice(*bucket.local)].sum())
        stats.sent["local"] += local
        stats.received["local"] += local
    return stats


def _difference(whole: WireStats, part: WireStats) -> WireStats:
    return WireStats(
        {link: whole.sent[link] - part.sent[link] for link in whole.sent},
        {link: whole.received[link] - part.received[link] for link in whole.received},
        whole.messages - part.messages,
    )


def _sum(*stats: WireStats) -> WireStats:
    total = WireStats(messages=sum(s.messages for s in stats))
    for one in stats:
        for mine, theirs in ((total.sent, one.sent), (total.received, one.received), (total.seconds, one.seconds)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) + value
    return total
