"""The gloo wire: a group of its own (never the trainer's), usable wherever torch runs.

gloo cannot be interrupted: an operation on a dead peer blocks until its own timeout. So operations are waited for in a
helper thread, the caller watches the control connection and the deadline, and after a failure the group is abandoned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta

import torch
import torch.distributed as dist

from refit_transport.runtime.binding import Binding, peers_of
from refit_transport.runtime.replay import BoundMessage
from refit_transport.runtime.staging import Staging

from .base import Peer, WireError, WireStats
from .cuts import common_cuts, cut, cut_points
from .lockstep import Part, hops_of, run_lockstep

_POLL = 0.05


class GlooWire:
    """One rank's end. ``network_interface`` names the network device to bind to; by default gloo resolves the host
    name."""

    name = "gloo"

    def __init__(self, network_interface: str | None = None) -> None:
        self._interface = network_interface
        self._store: dist.TCPStore | None = None
        self._group: dist.ProcessGroupGloo | None = None
        self._peers: dict[int, Peer] = {}
        self._rank = -1
        self._staging = Staging(direct_bytes=None)
        self._cuts: dict[tuple[int, int, bool], list[int]] | None = None
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="refit-gloo")

    def listen(self, rank: int) -> dict[str, object]:
        """Rank 0 hosts the store at which the group meets."""
        if rank != 0:
            return {}
        host = _address_of(self._interface)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return {"host": host, "port": self._store.port}

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        self._rank, self._peers = rank, {peer.rank: peer for peer in peers}
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        host = peers[0].endpoint
        try:
            if self._store is None:
                self._store = dist.TCPStore(host["host"], host["port"], is_master=False, timeout=left)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = left
            options._devices = [self._device()]
            options._threads = 2
            prefix = dist.PrefixStore(f"gloo/{peers[0].incarnation}", self._store)
            self._group = dist.ProcessGroupGloo(prefix, rank, len(peers), options)
        except RuntimeError as error:
            raise WireError(
                f"gloo: rank {rank} could not meet the group at {peers[0]}: {error}", phase="connect"
            ) from error

    def _device(self) -> object:
        make = dist.ProcessGroupGloo.create_device
        if self._interface:
            return make(interface=self._interface, lazy_init=True)
        return make(hostname=_address_of(None), lazy_init=True)

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """See ``Wire.run``."""
        if self._group is None:
            raise WireError("gloo: the wire is not connected", phase="run")
        binding.bind(self._staging)
        backend = _Operations(self._group, self._waiter, self._peers, deadline, failed)
        if self._cuts is None:
            self._cuts = self._exchange_cuts(binding, backend)

        def parts(message: BoundMessage, bucket: int, index: int, sending: bool) -> list[torch.Tensor]:
            return cut(message.segments, self._cuts[bucket, index, sending])

        return run_lockstep(binding, backend, parts, hops_of(binding.plan))

    def _exchange_cuts(self, binding: Binding, backend: _Operations) -> dict[tuple[int, int, bool], list[int]]:
        """Forwarded messages leave from several runs of staging: tell each receiver where they are cut."""
        outgoing: dict[int, list[list[int]]] = {peer: [] for peer in peers_of(binding.program)}
        cuts: dict[tuple[int, int, bool], list[int]] = {}
        for number, bucket in enumerate(binding.buckets):
            for index, message in _in_order(bucket.sends):
                cuts[number, index, True] = cut_points(message.segments)
                outgoing[message.peer].append(cuts[number, index, True])
        store = dist.PrefixStore(f"cuts/{self._peers[0].incarnation}", self._store)
        for peer, lists in outgoing.items():
            store.set(f"{self._rank}>{peer}", json.dumps(lists))
        incoming = {peer: iter(backend.fetch(store, f"{peer}>{self._rank}", peer)) for peer in outgoing}
        for number, bucket in enumerate(binding.buckets):
            for index, message in _in_order(bucket.recvs):
                cuts[number, index, False] = common_cuts(cut_points(message.segments), next(incoming[message.peer]))
        return cuts

    def close(self) -> None:
        """Abandon the group; an operation that is stuck in it ends at its own timeout, in the helper thread."""
        if self._group is not None:
            self._group.abort()
        self._waiter.shutdown(wait=False, cancel_futures=True)
        self._group = self._store = self._cuts = None


def _in_order(messages: list[BoundMessage]) -> list[tuple[int, BoundMessage]]:
    """By hop: the order in which both ends count the messages between them."""
    return sorted(enumerate(messages), key=lambda item: item[1].hop)


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

    def fetch(self, store: dist.PrefixStore, key: str, peer: int) -> list[list[int]]:
        def get() -> list[list[int]]:
            store.wait([key], timedelta(seconds=max(0.01, self._deadline - time.monotonic())))
            value = json.loads(store.get(key))
            store.delete_key(key)
            return value

        return self._watch(self._waiter.submit(get), lambda: ("learning message cuts of", peer))

    def _watch(self, future: Future, where: Callable[[], tuple[str, int]]) -> object:
        while True:
            try:
                return future.result(timeout=_POLL)
            except NotYet:
                news = self._failed()
                if news is not None:
                    raise WireError(news, phase="exchange") from None
                if time.monotonic() > self._deadline:
                    raise self._error(where(), "the deadline passed") from None
            except (RuntimeError, dist.DistError) as error:
                raise self._error(where(), str(error).splitlines()[0]) from error

    def _error(self, where: tuple[str, int], cause: str) -> WireError:
        doing, peer = where
        return WireError(f"gloo: failed {doing} {self._peers[peer]}: {cause}", peer=peer, phase="exchange")

    def drain(self) -> None:
        """Everything was waited for."""


def _address_of(interface: str | None) -> str:
    if interface is None:
        return "127.0.0.1"
    import psutil

    for address in psutil.net_if_addrs().get(interface, []):
        if address.family.name == "AF_INET":
            return address.address
    raise ValueError(f"network interface {interface!r} has no IPv4 address; there are {sorted(psutil.net_if_addrs())}")
