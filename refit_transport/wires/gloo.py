"""The gloo wire: a group of its own (never the trainer's), usable wherever torch runs.

gloo cannot be interrupted: an operation on a dead peer blocks until its own timeout. So operations are waited for in a
helper thread, the caller watches the control connection and the deadline, and after a failure the group is abandoned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta

import torch
import torch.distributed as dist

from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import BoundMessage
from refit_transport.runtime.staging import Staging

from .base import Peer, WireError, WireStats
from .cuts import cut
from .lockstep import Part, hops_of, run_lockstep
from .message_cuts import Cuts, exchange_cuts
from .rendezvous import Meeting, address_of

_POLL = 0.05


class GlooWire:
    """One rank's end. ``network_interface`` names the network device to bind to; by default gloo resolves the host
    name."""

    name = "gloo"

    def __init__(self, network_interface: str | None = None) -> None:
        self._interface = network_interface
        self._meeting = Meeting(network_interface)
        self._group: dist.ProcessGroupGloo | None = None
        self._peers: dict[int, Peer] = {}
        self._rank = -1
        self._staging = Staging(direct_bytes=None)
        self._cuts: Cuts | None = None
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="refit-gloo")

    def listen(self, rank: int) -> dict[str, object]:
        """Rank 0 hosts the store at which the group meets."""
        return self._meeting.host(rank)

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        self._rank, self._peers = rank, {peer.rank: peer for peer in peers}
        store = dist.PrefixStore("gloo", self._meeting.store(peers, deadline))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_of(self._interface), lazy_init=True)]
        options._threads = 2
        try:
            self._group = dist.ProcessGroupGloo(store, rank, len(peers), options)
        except RuntimeError as error:
            raise WireError(f"gloo: rank {rank} could not form the group: {error}", phase="connect") from error

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """See ``Wire.run``."""
        if self._group is None:
            raise WireError("gloo: the wire is not connected", phase="run")
        binding.bind(self._staging)
        backend = _Operations(self._group, self._waiter, self._peers, deadline, failed)
        if self._cuts is None:
            store = dist.PrefixStore("cuts", self._meeting.store(tuple(self._peers.values()), deadline))
            self._cuts = backend.watched(lambda: exchange_cuts(binding, self._rank, store, deadline))

        def parts(message: BoundMessage, bucket: int, index: int, sending: bool) -> list[torch.Tensor]:
            return cut(message.segments, self._cuts[bucket, index, sending])

        return run_lockstep(binding, backend, parts, hops_of(binding.plan))

    def close(self) -> None:
        """Abandon the group; an operation that is stuck in it ends at its own timeout, in the helper thread."""
        if self._group is not None:
            self._group.abort()
        self._waiter.shutdown(wait=False, cancel_futures=True)
        self._meeting.close()
        self._group = self._cuts = None


class _Operations:
    """The lock-step backend: posts to the group, waits in the helper thread."""

    def __init__(
        self,
        group: dist.ProcessGroupGloo,
        waiter: ThreadPoolExecutor,
        peers: dict[int, Peer],
        deadline: float,
        failed: Callable[[], str | None],
    ) -> None:
        self._group, self._waiter, self._peers = group, waiter, peers
        self._deadline, self._failed = deadline, failed
        self._tags: dict[tuple[int, bool], int] = {}

    def post(self, sends: list[Part], recvs: list[Part]) -> list[tuple[str, int, dist.Work]]:
        works = [("receiving from", p, self._group.recv([t], p, self._tag(p, False))) for p, t in recvs]
        return works + [("sending to", p, self._group.send([t], p, self._tag(p, True))) for p, t in sends]

    def _tag(self, peer: int, sending: bool) -> int:
        """Counts the operations of a direction of a pair, the same on both ends."""
        self._tags[peer, sending] = tag = self._tags.get((peer, sending), 0) + 1
        return tag

    def wait(self, handle: list[tuple[str, int, dist.Work]]) -> None:
        at = [0]

        def all_of() -> None:
            for at[0], (_, _, work) in enumerate(handle):
                work.wait(timedelta(seconds=max(0.01, self._deadline - time.monotonic())))

        self._watch(self._waiter.submit(all_of), lambda: handle[at[0]][:2])

    def watched(self, call: Callable[[], object]) -> object:
        """The result of ``call``, made in the helper thread."""
        return self._watch(self._waiter.submit(call), lambda: None)

    def _watch(self, future: Future, where: Callable[[], tuple[str, int] | None]) -> object:
        while True:
            try:
                return future.result(timeout=_POLL)
            except NotYet:
                news = self._failed()
                if news is not None:
                    raise WireError(news, phase="exchange") from None
                if time.monotonic() > self._deadline:
                    raise self._error(where(), "the deadline passed") from None
            except WireError:
                raise
            except (RuntimeError, dist.DistError) as error:
                raise self._error(where(), str(error).splitlines()[0]) from error

    def _error(self, where: tuple[str, int] | None, cause: str) -> WireError:
        if where is None:
            return WireError(f"gloo: {cause}", phase="bind")
        doing, peer = where
        return WireError(f"gloo: failed {doing} {self._peers[peer]}: {cause}", peer=peer, phase="exchange")

    def drain(self) -> None:
        """Everything was waited for."""
