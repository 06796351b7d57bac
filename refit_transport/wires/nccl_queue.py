"""The work queued on one GPU: its device, its streams, its memory, and marks in them that the host can look at."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the queue."""

    def query(self) -> bool:
        """Whether everything before it is done; never waits."""


class Queue(Protocol):
    """What the NCCL wires need of a device. Tests replace it where there is no GPU."""

    device: torch.device

    def memory(self, nbytes: int) -> torch.Tensor:
        """uint8 memory of the device."""

    def stream(self) -> object:
        """The stream that the caller queues on."""

    def side_stream(self) -> object:
        """A new stream of the device."""

    def on(self, stream: object) -> AbstractContextManager[None]:
        """Makes this thread queue on ``stream``."""

    def mark(self) -> Mark:
        """A mark at the present end of the caller's stream."""

    def follow(self, mark: Mark) -> None:
        """What the caller queues on its stream from now on waits for ``mark``; the host does not."""


class CudaQueue:
    """The current CUDA device of the thread that makes it. Raises RuntimeError when there is none."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream())
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        mark.wait(self.stream())
