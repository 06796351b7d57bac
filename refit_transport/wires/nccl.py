"""The NCCL wire: grouped point-to-point calls in a communicator of its own, never the trainer's or the engine's.

Everything of a refit is queued on streams: packing, exchange and unpacking of all buckets, without waiting on the
host. Only the end is waited for, by polling an event, so that a lost peer ends in ``abort`` of the communicator and an
error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from .rendezvous import Meeting

_POLL = 0.002


class NcclWire:
    """One rank's end, on the current CUDA device."""

    name = "nccl"

    def __init__(self, network_interface: str | None = None) -> None:
        self._meeting = Meeting(network_interface)
        self._group: dist.ProcessGroup | None = None
        self._peers: dict[int, Peer] = {}
        self._rank = -1
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._staging = Staging(allocate=self._memory, arena=self._memory, direct_bytes=None)
        self._cuts: Cuts | None = None

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def listen(self, rank: int) -> dict[str, object]:
        """Rank 0 hosts the store through which the communicator's id travels."""
        return self._meeting.host(rank)

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        self._rank, self._peers = rank, {peer.rank: peer for peer in peers}
        store = self._meeting.store(peers, deadline)
        try:
            self._group = self._make_group(dist.PrefixStore("nccl", store), rank, len(peers), deadline)
        except RuntimeError as error:
            raise WireError(f"NCCL: rank {rank} could not form the communicator: {error}", phase="connect") from error

    def _make_group(self, store: dist.Store, rank: int, size: int, deadline: float) -> dist.ProcessGroup:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        options.config.blocking = 0
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(self._device)
        return group

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """See ``Wire.run``."""
        if self._group is None:
            raise WireError("NCCL: the wire is not connected", phase="run")
        binding.bind(self._staging)
        if self._cuts is None:
            store = dist.PrefixStore("cuts", self._meeting.store(tuple(self._peers.values()), deadline))
            self._cuts = exchange_cuts(binding, self._rank, store, deadline)

        def parts(message: BoundMessage, bucket: int, index: int, sending: bool) -> list[torch.Tensor]:
            return cut(message.segments, self._cuts[bucket, index, sending])

        return run_lockstep(binding, _Groups(self, deadline, failed), parts, hops_of(binding.plan))

    def close(self) -> None:
        """Abort the communicator: the only way out of a kernel that waits for a peer that is gone."""
        if self._group is not None:
            self._group.abort()
        self._meeting.close()
        self._group = self._cuts = None


class _Groups:
    """The lock-step backend: one NCCL group per step, ordered by streams."""

    def __init__(self, wire: NcclWire, deadline: float, failed: Callable[[], str | None]) -> None:
        self._wire, self._deadline, self._failed = wire, deadline, failed
        self._last: tuple[int, ...] = ()

    def post(self, sends: list[Part], recvs: list[Part]) -> dist.Work:
        group, device = self._wire._group, self._wire._device
        self._last = tuple(sorted({peer for peer, _ in (*sends, *recvs)}))
        group._start_coalescing(device)
        for peer, tensor in recvs:
            group.recv([tensor], peer, 0)
        for peer, tensor in sends:
            group.send([tensor], peer, 0)
        return group._end_coalescing(device)

    def wait(self, handle: dist.Work) -> None:
        """Later work of the current stream waits for the group; the host does not."""
        handle.wait()

    def drain(self) -> None:
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            news = self._failed()
            if news is None and time.monotonic() > self._deadline:
                peers = ", ".join(str(self._wire._peers[peer]) for peer in self._last)
                news = f"NCCL: the deadline passed; the last group of rank {self._wire._rank} exchanges with {peers}"
            if news is not None:
                self._wire._group.abort()
                raise WireError(news, phase="exchange")
            time.sleep(_POLL)
