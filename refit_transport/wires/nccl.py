"""The NCCL wire: grouped point-to-point calls in a communicator of its own, never the trainer's or the engine's.

Everything of a refit is queued on streams: packing on one, exchange on the communicator's own, unpacking and loading on
another, with events where a slot of memory passes from one to the next, and without waiting for the device. Only the
end is waited for, by looking at a mark, so that a lost peer ends in ``abort`` of the communicator and
an error. Calls into NCCL are made in a helper thread: the first exchange of a pair connects it, and that takes as long
as the peer takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Thread

import torch
import torch.distributed as dist

from refit_transport.runtime.binding import Binding
from refit_transport.runtime.staging import SLOTS, Staging

from .base import Peer, WireError, WireStats
from .blame import LINGER_SECONDS, Register
from .helper_thread import NEWS_SECONDS, HelperThread, Interrupted, heard
from .lockstep import Part, hops_of, run_lockstep
from .message_cuts import DIRECT_BYTES, CutMessages
from .nccl_group import GroupMaker, make_group
from .nccl_queue import CudaQueue, Mark, Queue
from .rendezvous import Meeting
from .watch import Watch

log = logging.getLogger("refit_transport")

_POLL = 0.002
_ABORT_SECONDS = 0.5
"""``abort`` frees NCCL's kernels within milliseconds; longer, and it goes on behind the caller's back."""


class NcclWire:
    """One rank's end, on the current CUDA device of the thread that makes it."""

    name = "nccl"

    def __init__(
        self,
        network_interface: str | None = None,
        queue: Queue | None = None,
        group_maker: GroupMaker = make_group,
        direct_bytes: int = DIRECT_BYTES,
        staging_memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._meeting = Meeting(network_interface)
        self._make_group = group_maker
        self._queue = queue or CudaQueue()
        self._packing, self._unpacking = self._queue.side_stream(), self._queue.side_stream()
        self._group: dist.ProcessGroupNCCL | None = None
        self._unreleased: dist.ProcessGroupNCCL | None = None
        """The group while nobody has aborted it: the watch and the caller may both want to, at the same time."""
        self._releasing = Lock()
        self._peers: dict[int, Peer] = {}
        self._rank = -1
        memory = staging_memory or self._queue.memory
        self.staging = Staging(allocate=memory, arena=self._queue.memory, direct_bytes=direct_bytes)
        self._messages: CutMessages | None = None
        self._helper = HelperThread("refit-nccl")

    def listen(self, rank: int) -> dict[str, object]:
        """Rank 0 hosts the store through which the communicator's id travels."""
        return self._meeting.host(rank)

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        self._rank, self._peers = rank, {peer.rank: peer for peer in peers}
        store = dist.PrefixStore("nccl", self._meeting.store(peers, deadline))
        try:
            self._group = self._unreleased = self._make_group(store, rank, len(peers), self._queue.device)
            self._helper.call(self._form, deadline, lambda: None)
        except Interrupted as gave_up:
            self.close()
            raise WireError(
                f"NCCL: rank {rank} could not form the communicator of {len(peers)} ranks: {gave_up}", phase="connect"
            ) from None
        except RuntimeError as error:
            self.close()
            raise WireError(f"NCCL: rank {rank} could not form the communicator: {error}", phase="connect") from error

    def _form(self) -> None:
        with self._queue.on(self._queue.stream()):
            self._group.eager_connect_single_device(self._queue.device)

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """See ``Wire.run``."""
        if self._group is None:
            raise WireError("NCCL: the wire is not connected", phase="run")
        with Watch(failed, deadline, self.release) as watch:
            return self.exchange(binding, version, deadline, watch)

    def exchange(self, binding: Binding, version: int, deadline: float, watch: Watch) -> WireStats:
        """``run`` under a watch that another wire opened."""
        binding.bind(self.staging)
        register = Register(self.store("blame", deadline), self._rank, version)
        groups = _Groups(self, deadline, watch, register)
        if self._messages is None or self._messages.binding is not binding:
            store = self.store(f"cuts {version}", deadline)
            self._messages = groups.watched(lambda: CutMessages.agree(binding, self._rank, store, deadline))
        self._messages.refresh()
        stats = run_lockstep(binding, groups, self._messages, hops_of(binding.plan))
        register.through()
        return stats

    def store(self, prefix: str, deadline: float) -> dist.Store:
        """Where the ranks of this membership exchange plain data, under ``prefix``."""
        return dist.PrefixStore(prefix, self._meeting.store(tuple(self._peers.values()), deadline))

    def release(self) -> None:
        """Abort what is under way, from any thread."""
        with self._releasing:
            group, self._unreleased = self._unreleased, None
        if group is not None:
            abort_in_background(group.abort)

    def close(self, lingering: bool = False) -> None:
        """Abort the communicator: the only way out of a kernel that waits for a peer that is gone."""
        self.release()
        self._helper.close()
        self._meeting.close(LINGER_SECONDS if lingering else 0.0)
        self._group = self._messages = None


def abort_in_background(abort: Callable[[], object]) -> None:
    """Call ``abort`` and return when it is through, at the latest after a few seconds."""

    def call() -> None:
        try:
            abort()
        except RuntimeError as error:
            log.warning("NCCL: abort failed: %s", error)

    thread = Thread(target=call, name="refit-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_SECONDS)


class _Groups:
    """The lock-step backend: one NCCL group per step, ordered by streams.

    The communicator's stream waits for the packing stream at every group and runs the groups in order. The unpacking
    stream waits for groups, and the packing stream for what was unpacked from the slot that it fills.
    """

    in_order = True

    def __init__(self, wire: NcclWire, deadline: float, watch: Watch, register: Register) -> None:
        self._wire, self._deadline, self._watch, self._register = wire, deadline, watch, register
        self._queue = wire._queue
        begun = self._queue.mark()
        for stream in (wire._packing, wire._unpacking):
            with self._queue.on(stream):
                self._queue.follow(begun)
        self._packed: dict[int, Mark] = {}
        self._unpacked: dict[int, Mark] = {}
        """By bucket: the end of its copies, until its slot passes on."""
        self._posting: frozenset[int] = frozenset()
        self._works: list[tuple[dist.Work, frozenset[int]]] = []
        """Groups that are not known to be through, and the peers of each."""

    def post(self, sends: list[Part], recvs: list[Part]) -> dist.Work:
        self._posting = frozenset(peer for peer, _ in (*sends, *recvs))
        work = self.watched(lambda: self._grouped(sends, recvs))
        self._works.append((work, self._posting))
        self._posting = frozenset()
        return work

    def _grouped(self, sends: list[Part], recvs: list[Part]) -> dist.Work:
        group = self._wire._group
        with self._queue.on(self._wire._packing):
            group._start_coalescing()
            for peer, tensor in recvs:
                group.recv([tensor], peer, 0)
            for peer, tensor in sends:
                group.send([tensor], peer, 0)
            return group._end_coalescing()

    def wait(self, handle: dist.Work) -> None:
        """What is unpacked from now on waits for the group; the host does not."""

        def on_stream() -> None:
            with self._queue.on(self._wire._unpacking):
                handle.wait()

        self.watched(on_stream)

    @contextmanager
    def packing(self, bucket: int) -> Iterator[None]:
        """On the packing stream."""
        with self._queue.on(self._wire._packing):
            if bucket >= SLOTS:
                self._queue.follow(self._unpacked.pop(bucket - SLOTS))
            yield
            self._packed[bucket] = self._queue.mark()

    @contextmanager
    def unpacking(self, bucket: int) -> Iterator[None]:
        """On the unpacking stream."""
        with self._queue.on(self._wire._unpacking):
            self._queue.follow(self._packed.pop(bucket))
            yield
            self._unpacked[bucket] = self._queue.mark()

    def watched(self, call: Callable[[], object]) -> object:
        """The result of ``call``, made in the helper thread; after a failure the communicator is aborted."""
        try:
            return self._wire._helper.call(call, self._deadline, self._watch.news)
        except Interrupted as gave_up:
            raise self._failure(gave_up.news, str(gave_up)) from None
        except WireError:
            self._wire.close()
            raise
        except RuntimeError as error:
            raise self._failure(heard(self._watch.news, NEWS_SECONDS), str(error).splitlines()[0]) from error

    def drain(self) -> None:
        """Wait for the end of the refit by looking: a wait could not be left when a peer is lost."""
        for stream in (self._wire._packing, self._wire._unpacking):
            with self._queue.on(stream):
                end = self._queue.mark()
            self._queue.follow(end)
        mark = self._queue.mark()
        while not mark.query():
            self._look()
            if (news := self._watch.news()) is not None or time.monotonic() > self._deadline:
                raise self._failure(news, "the deadline passed")
            time.sleep(_POLL)
        self._look()
        if self._watch.released:
            raise self._failure(self._watch.news(), "the deadline passed")

    def _look(self) -> None:
        """Drop the groups that are through. Raises WireError when NCCL reports an error in one."""
        while self._works and self._works[0][0].is_completed():
            error = self._works[0][0].exception()
            if error is not None:
                raise self._failure(heard(self._watch.news, NEWS_SECONDS), str(error).splitlines()[0])
            self._works.pop(0)

    def _failure(self, news: str | None, cause: str) -> WireError:
        waits_for = self._posting.union(*(peers for work, peers in self._works if not work.is_completed()))
        self._register.give_up(waits_for)
        if news is None:
            culprit = self._register.culprit(waits_for)
        self._wire.close(lingering=True)
        if news is not None:
            return WireError(news, phase="exchange")
        named = sorted(waits_for) if culprit is None else [culprit]
        peers = ", ".join(str(self._wire._peers[peer]) for peer in named) or "no peer"
        text = f"NCCL: {cause}; rank {self._wire._rank} waits for {peers}"
        return WireError(text, peer=culprit, phase="exchange")
