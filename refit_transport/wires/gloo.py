"""The gloo wire: a group of its own (never the trainer's), usable wherever torch runs.

gloo cannot be interrupted: an operation on a dead peer blocks until its own timeout. So operations are waited for in a
helper thread with a deadline derived from their bytes; the caller watches the control connection and its own deadline,
and after a failure the group is abandoned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from refit_transport.runtime.binding import Binding
from refit_transport.runtime.staging import Staging

from .base import Peer, WireError, WireStats
from .blame import LINGER_SECONDS, Register
from .helper_thread import NEWS_SECONDS, HelperThread, Interrupted, heard
from .lockstep import Part, hops_of, run_lockstep
from .message_cuts import DIRECT_BYTES, CutMessages
from .rendezvous import Meeting, address_of


class GlooWire:
    """One rank's end. ``network_interface`` names the network device to bind to; by default the one that
    leads out of this host.

    A group that is not through ``patience`` seconds plus its bytes at ``slowest`` bytes per second after it is waited
    for has failed: this bounds how long an abandoned helper thread lives on. ``patience`` covers what a peer does
    between two groups, above all an engine that loads whole tensors.
    """

    name = "gloo"

    def __init__(
        self,
        network_interface: str | None = None,
        patience: float = 60.0,
        slowest: float = 10e6,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        self._interface = network_interface
        self._patience, self._slowest = patience, slowest
        self._meeting = Meeting(network_interface)
        self._group: dist.ProcessGroupGloo | None = None
        self._peers: dict[int, Peer] = {}
        self._rank = -1
        self._staging = Staging(direct_bytes=direct_bytes)
        self._messages: CutMessages | None = None
        self._gave_up = False
        self._helper = HelperThread("refit-gloo")

    def listen(self, rank: int) -> dict[str, object]:
        """Rank 0 hosts the store at which the group meets."""
        return self._meeting.host(rank)

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        """Connects every pair: a pair that connects at its first operation would block on a dead peer for minutes."""
        self._rank, self._peers = rank, {peer.rank: peer for peer in peers}
        store = dist.PrefixStore("gloo", self._meeting.store(peers, deadline))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_of(self._interface))]
        options._threads = 2

        def form() -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(store, rank, len(peers), options)

        try:
            self._group = self._helper.call(form, deadline, lambda: None)
        except (RuntimeError, Interrupted) as error:
            cause = str(error).splitlines()[0]
            raise WireError(f"gloo: rank {rank} could not form the group: {cause}", phase="connect") from error

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """See ``Wire.run``."""
        if self._group is None:
            raise WireError("gloo: the wire is not connected", phase="run")
        binding.bind(self._staging)
        root = self._meeting.store(tuple(self._peers.values()), deadline)
        register = Register(dist.PrefixStore("blame", root), self._rank, version)
        backend = _Operations(self, deadline, failed, register)
        if self._messages is None or self._messages.binding is not binding:
            store = dist.PrefixStore(f"cuts {version}", root)
            self._messages = backend.watched(lambda: CutMessages.agree(binding, self._rank, store, deadline))
        self._messages.refresh()
        stats = run_lockstep(binding, backend, self._messages, hops_of(binding.plan))
        register.through()
        return stats

    def close(self) -> None:
        """Abandon the group; an operation that is stuck in it ends at its own timeout, in the helper thread."""
        if self._group is not None:
            self._group.abort()
        self._helper.close()
        self._meeting.close(LINGER_SECONDS if self._gave_up else 0.0)
        self._group = self._messages = None


class _Operations:
    """The lock-step backend: posts to the group, waits in the helper thread. gloo moves the bytes in a thread of its
    own, all groups side by side, while the caller packs and unpacks."""

    in_order = False

    def __init__(self, wire: GlooWire, deadline: float, failed: Callable[[], str | None], register: Register) -> None:
        self._wire, self._group = wire, wire._group
        self._deadline, self._failed, self._register = deadline, failed, register
        self._tags: dict[tuple[int, str], int] = {}

    def post(self, sends: list[Part], recvs: list[Part]) -> _Posted:
        patience = self._wire._patience + sum(t.numel() for _, t in (*sends, *recvs)) / self._wire._slowest
        posted = _Posted(patience)
        calls = [("receiving from", self._group.recv, part) for part in recvs]
        calls += [("sending to", self._group.send, part) for part in sends]
        for doing, call, (peer, tensor) in calls:
            posted.now = doing, peer
            try:
                posted.works.append((doing, peer, call([tensor], peer, self._tag(peer, doing))))
            except RuntimeError as error:
                raise self._broken(error, posted) from error
        return posted

    def _tag(self, peer: int, doing: str) -> int:
        """Counts the operations of a direction of a pair, the same on both ends."""
        self._tags[peer, doing] = tag = self._tags.get((peer, doing), 0) + 1
        return tag

    def wait(self, handle: _Posted) -> None:
        handle.deadline = min(self._deadline, time.monotonic() + handle.patience)
        self._watch(handle.wait, handle)

    def packing(self, bucket: int) -> AbstractContextManager[None]:
        """Copies are made at once."""
        return nullcontext()

    unpacking = packing

    def watched(self, call: Callable[[], object]) -> object:
        """The result of ``call``, made in the helper thread."""
        return self._watch(call, None)

    def _watch(self, call: Callable[[], object], posted: _Posted | None) -> object:
        try:
            return self._wire._helper.call(call, self._deadline, self._failed)
        except Interrupted as gave_up:
            if gave_up.news is not None:
                raise WireError(gave_up.news, phase="exchange") from None
            raise self._late(posted, str(gave_up)) from None
        except WireError:
            raise
        except (RuntimeError, dist.DistError) as error:
            if posted is not None and time.monotonic() >= posted.deadline:
                raise self._late(posted, f"no progress in {posted.patience:.1f} s") from error
            raise self._broken(error, posted) from error

    def _late(self, posted: _Posted | None, cause: str) -> WireError:
        self._wire._gave_up = True
        culprit = self._register.culprit(posted.awaited()) if posted is not None else None
        return self._error(("waiting for", culprit) if culprit is not None else posted and posted.now, cause)

    def _broken(self, error: Exception, posted: _Posted | None) -> WireError:
        """The peer at the other end may have left because of a third one: the control connection knows, or its own
        last words."""
        if posted is not None:
            self._register.give_up(posted.awaited())
        news = heard(self._failed, NEWS_SECONDS)
        return WireError(news, phase="exchange") if news else self._late(posted, str(error).splitlines()[0])

    def _error(self, where: tuple[str, int] | None, cause: str) -> WireError:
        if where is None:
            return WireError(f"gloo: {cause}", phase="bind")
        doing, peer = where
        return WireError(f"gloo: failed {doing} {self._wire._peers[peer]}: {cause}", peer=peer, phase="exchange")

    def drain(self) -> None:
        """Everything was waited for."""


class _Posted:
    """The operations of a group, and how far they have been waited for."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        """Seconds that it may take from when it is waited for."""
        self.deadline = math.inf
        self.works: list[tuple[str, int, dist.Work]] = []
        self.now: tuple[str, int] | None = None
        """What is being done, and the peer."""
        self._done = 0

    def awaited(self) -> set[int]:
        """The peers of all operations that are not through."""
        return {peer for _, peer, _ in self.works[self._done :]} | ({self.now[1]} if self.now else set())

    def wait(self) -> None:
        for number, (doing, peer, work) in enumerate(self.works):
            self._done, self.now = number, (doing, peer)
            work.wait(timedelta(seconds=max(0.01, self.deadline - time.monotonic())))
