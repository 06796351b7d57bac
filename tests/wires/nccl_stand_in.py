"""A STAND-IN for torch's ProcessGroupNCCL and a CUDA device: it moves the bytes over gloo and enforces NCCL's rules.

It is not NCCL: it proves that the wire keeps the rules that are checked here, and nothing about speed or about NCCL
itself. Checked are: groups are opened and closed; tensors are contiguous, non-empty and uint8; both ends of a call
agree on its size; calls of a pair match in order; a rank's groups run one after the other in the order of posting (so
that an order which differs between ranks hangs, as it would with NCCL); what is sent does not change until its group is
through; memory of the device that one stream wrote is used by another only after an event or a wait between them, and
overwritten only after an event that follows its last use. The host works in the order of its calls and so hides such a
race; ``Races`` finds it all the same, by the clocks of the streams.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import torch
import torch.distributed as dist

POISON = 0xEE
HEADER = torch.int64


class RuleBroken(RuntimeError):
    """What NCCL would answer with an error, a hang or wrong bytes."""


@dataclass(eq=False)
class Stream:
    """Of one device. ``clock`` says how much of every stream's work comes before what is queued next."""

    name: str
    clock: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Mark:
    """An event."""

    clock: Counter[str]

    def query(self) -> bool:
        return True


class Races:
    """Remembers which stream used which byte of the device's memory, and when."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[tuple[str, bool], torch.Tensor]] = {}

    def watch(self, memory: torch.Tensor) -> None:
        self._seen[memory.untyped_storage().data_ptr()] = {}

    def use(self, stream: Stream, tensor: torch.Tensor, *, write: bool) -> None:
        """Raises RuleBroken when another stream's use of the same bytes may come at the same time."""
        storage = tensor.untyped_storage()
        seen = self._seen.get(storage.data_ptr())
        if seen is None:
            return
        stream.clock[stream.name] += 1
        elements = torch.arange(storage.nbytes() // tensor.itemsize)
        elements = elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1, 1)
        where = (elements * tensor.itemsize + torch.arange(tensor.itemsize)).reshape(-1)
        for (other, wrote), last in seen.items():
            if other != stream.name and (write or wrote) and bool((last[where] > stream.clock[other]).any()):
                uses = ("reads", "writes")
                raise RuleBroken(
                    f"the {stream.name} stream {uses[write]} what the {other} stream {uses[wrote]}, no event between"
                )
        last = seen.setdefault((stream.name, write), torch.zeros(storage.nbytes(), dtype=torch.int64))
        last[where] = stream.clock[stream.name]


class HostQueue:
    """Stands in for a CUDA device: what is queued is done at once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.races = Races()
        self._here = threading.local()
        self._caller = Stream("caller's")
        self._sides = 0
        self.communicator = Stream("communicator's")

    def memory(self, nbytes: int) -> torch.Tensor:
        found = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.races.watch(found)
        return found

    def stream(self) -> Stream:
        return getattr(self._here, "stream", self._caller)

    def side_stream(self) -> Stream:
        self._sides += 1
        return Stream(f"side {self._sides}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def mark(self) -> Mark:
        return Mark(Counter(self.stream().clock))

    def follow(self, mark: Mark) -> None:
        self.stream().clock |= mark.clock

    def use(self, tensor: torch.Tensor, *, write: bool) -> None:
        """Note that the present stream uses ``tensor``."""
        self.races.use(self.stream(), tensor, write=write)


def note_copies(queue: HostQueue, monkeypatch) -> None:
    """Every replayed copy is a use of memory by the stream on which it is queued."""
    copy = torch._foreach_copy_

    def noted(dst: list[torch.Tensor], src: list[torch.Tensor]) -> None:
        for tensors, write in ((src, False), (dst, True)):
            for tensor in tensors:
                queue.use(tensor, write=write)
        copy(dst, src)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)


class Group:
    """What the wire uses of ProcessGroupNCCL, on the device ``queue``."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, queue: HostQueue | None = None
    ) -> None:
        self._device = queue or HostQueue()
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
        work = Work(calls, self.aborted, self._device)
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
        work.begin()
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
        work.end()


class Work:
    """A group: queued behind those before it; received bytes are there when it is through."""

    def __init__(
        self, calls: list[tuple[bool, int, torch.Tensor]], aborted: threading.Event, device: HostQueue
    ) -> None:
        self.calls = calls
        self.through = threading.Event()
        self.error: Exception | None = None
        self._aborted, self._device = aborted, device
        self._check_overlap()
        device.communicator.clock |= device.stream().clock
        for sending, _, tensor in calls:
            device.races.use(device.communicator, tensor, write=not sending)
        self._clock = Counter(device.communicator.clock)

    def begin(self) -> None:
        for sending, _, tensor in self.calls:
            if not sending:
                tensor.fill_(POISON)
        self._checksums = [zlib.crc32(t.numpy()) for _, _, t in self.calls]
        self.staged = [t.clone() for _, _, t in self.calls]

    def end(self) -> None:
        for (sending, peer, tensor), staged, checksum in zip(self.calls, self.staged, self._checksums):
            if zlib.crc32(tensor.numpy()) != checksum:
                raise RuleBroken(f"what is exchanged with rank {peer} was changed before its group was through")
            if not sending:
                tensor.copy_(staged)

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
        self._device.stream().clock |= self._clock

    def is_completed(self) -> bool:
        return self.through.is_set()

    def exception(self) -> Exception | None:
        return self.error


def nccl_wire(**options: object):
    """An NcclWire over the stand-in."""
    from refit_transport.wires.nccl import NcclWire

    queue = HostQueue()
    return NcclWire(queue=queue, group_maker=partial(Group, queue=queue), **options)


def wait_until(condition, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()
