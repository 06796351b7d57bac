"""A STAND-IN for torch's ProcessGroupNCCL and a CUDA device: it moves the bytes over gloo and enforces NCCL's rules.

It is not NCCL: it proves that the wire keeps the rules that are checked here, and nothing about speed or about NCCL
itself. Checked are: groups are opened and closed; tensors are contiguous, non-empty and uint8; both ends of a call
agree on its size; calls of a pair match in order; a rank's groups run one after the other in the order of posting (so
that an order which differs between ranks hangs, as it would with NCCL); what is sent does not change until its group is
through; what is received is not there before its group was waited for.
"""

from __future__ import annotations

import threading
import time
import zlib
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import pairwise
from queue import SimpleQueue

import torch
import torch.distributed as dist

POISON = 0xEE
HEADER = torch.int64


class HostQueue:
    """Stands in for a CUDA device: what is queued is done at once."""

    device = torch.device("cpu")

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def stream(self) -> None:
        return None

    def on(self, stream: None) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> HostQueue:
        return self

    def query(self) -> bool:
        return True


class RuleBroken(RuntimeError):
    """What NCCL would answer with an error, a hang or wrong bytes."""


class Group:
    """What the wire uses of ProcessGroupNCCL."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._open: list[tuple[bool, int, torch.Tensor]] | None = None
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._tags: dict[tuple[bool, int], int] = {}
        self.aborted = threading.Event()
        self._gloo: dist.ProcessGroupGloo | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=30)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        threading.Thread(target=self._run, daemon=True).start()

    def _start_coalescing(self) -> None:
        if self._open is not None:
            raise RuleBroken("a group is open already")
        self._open = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._add(True, tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._add(False, tensors, peer)

    def _add(self, sending: bool, tensors: list[torch.Tensor], peer: int) -> None:
        (tensor,) = tensors
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        if self._open is None:
            raise RuleBroken("a call outside a group")
        if peer == self._rank:
            raise RuleBroken("a call to itself")
        if not tensor.is_contiguous() or tensor.dtype != torch.uint8 or not tensor.numel():
            raise RuleBroken(f"tensor of {tensor.dtype}, shape {tuple(tensor.shape)}, stride {tensor.stride()}")
        self._open.append((sending, peer, tensor))

    def _end_coalescing(self) -> Work:
        calls, self._open = self._open, None
        if not calls:
            raise RuleBroken("an empty group")
        work = Work(calls, self.aborted)
        self._queue.put(work)
        return work

    def abort(self) -> None:
        self.aborted.set()
        self._queue.put(None)

    def _run(self) -> None:
        """One group after the other, as the communicator's stream does."""
        while (work := self._queue.get()) is not None:
            try:
                self._exchange(work)
            except (RuntimeError, RuleBroken) as error:
                work.error = error
            work.through.set()

    def _exchange(self, work: Work) -> None:
        posted = []
        for (sending, peer, _), staged in zip(work.calls, work.staged):
            tag = self._tags[sending, peer] = self._tags.get((sending, peer), 0) + 1
            size = torch.tensor([staged.numel()], dtype=HEADER)
            call = self._gloo.send if sending else self._gloo.recv
            posted.append((size, call([size], peer, 2 * tag), call([staged], peer, 2 * tag + 1)))
        for (_, peer, tensor), (size, *works) in zip(work.calls, posted):
            for one in works:
                one.wait(timedelta(seconds=30))
            if int(size) != tensor.numel():
                raise RuleBroken(f"rank {peer} sends {int(size)} bytes where {tensor.numel()} are received")
        for (sending, peer, tensor), checksum in zip(work.calls, work.checksums):
            if sending and zlib.crc32(tensor.numpy()) != checksum:
                raise RuleBroken(f"what goes to rank {peer} was changed before its group was through")


class Work:
    """A group under way. Received bytes appear when it is waited for; until then the memory holds poison."""

    def __init__(self, calls: list[tuple[bool, int, torch.Tensor]], aborted: threading.Event) -> None:
        self.calls = calls
        self.through = threading.Event()
        self.error: Exception | None = None
        self._aborted = aborted
        for sending, _, tensor in calls:
            if not sending:
                tensor.fill_(POISON)
        self.checksums = [zlib.crc32(t.numpy()) for _, _, t in calls]
        self.staged = [t.clone() for _, _, t in calls]
        self._check_overlap()

    def _check_overlap(self) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel(), sending) for sending, _, t in self.calls)
        for (_, stop, a), (start, _, b) in pairwise(spans):
            if start < stop and not (a and b):
                raise RuleBroken("a group receives into memory that it also sends or receives")

    def wait(self) -> None:
        while not self.through.wait(0.005):
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
        if self.error is not None:
            raise self.error
        for (sending, _, tensor), staged in zip(self.calls, self.staged):
            if not sending:
                tensor.copy_(staged)

    def is_completed(self) -> bool:
        return self.through.is_set()

    def exception(self) -> Exception | None:
        return self.error


def nccl_wire(**options: object):
    """An NcclWire over the stand-in."""
    from refit_transport.wires.nccl import NcclWire

    return NcclWire(queue=HostQueue(), group_maker=Group, **options)


def wait_until(condition, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()
