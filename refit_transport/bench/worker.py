"""One rank of a refit benchmark: its shards, its methods, and the timed run of one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import BenchConfig
from .holdings import Shards
from .methods.base import Interfaces, Method, RankContext
from .methods.make import make
from .quiet import MemorySpan, open_descriptors, prioritised, private_memory
from .workload import BenchTensor


@dataclass(frozen=True, slots=True)
class Timing:
    """One rank's part in one refit. ``end`` is a ``time.monotonic()`` value, comparable between ranks of a machine."""

    end: float
    late: float
    """Seconds after the common start at which this rank woke up."""
    priority: str
    counted: Mapping[str, Any]


class Worker:
    """Answers the calls of ``refit.RefitBench``. Memory is measured while a method connects and in its first refit, so
    that what it allocates once and keeps is counted too."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._methods: dict[str, Method] = {}
        self._extra: dict[str, int] = {}
        self._measured: set[str] = set()

    def fill(self, version: int) -> None:
        self._context.source.fill(version)

    def wrong(self, version: int) -> list[str]:
        return self._context.sink.wrong(version)

    def publish(self, name: str) -> dict[str, Any]:
        self._methods[name] = make(name, self._context)
        return self._methods[name].publish()

    def connect(self, name: str, published: Mapping[int, dict[str, Any]]) -> None:
        span = MemorySpan()
        self._methods[name].connect(published)
        self._extra[name] = span.growth()

    def extra_memory(self, name: str) -> int:
        """Bytes by which this process grew while the method connected and in its first refit. Shared memory counts on
        the rank that made it."""
        return self._extra[name]

    def run(self, name: str, version: int, start: float) -> Timing:
        """Start at the monotonic time ``start``, which all ranks were given: a barrier without a message."""
        method = self._methods[name]
        span = None if name in self._measured else MemorySpan()
        with prioritised() as priority:
            time.sleep(max(0.0, start - time.monotonic()))
            late = time.monotonic() - start
            counted = method.run(version)
            end = time.monotonic()
        if span is not None:
            self._extra[name] += span.growth() + counted.get("shared_bytes", 0)
            self._measured.add(name)
        return Timing(end, late, priority, counted)

    def resources(self) -> dict[str, int]:
        return {"resident_bytes": private_memory(), "descriptors": open_descriptors()}

    def close(self) -> None:
        for method in self._methods.values():
            method.close()


def build(
    rank: int, config: BenchConfig, tensors: tuple[BenchTensor, ...], interfaces: Interfaces, folder: Path
) -> Worker:
    """A worker whose shards are allocated in the calling process."""
    source, sink = (Shards(tensors, side, rank) for side in ("trainers", "engines"))
    return Worker(RankContext(rank, config, tensors, source, sink, interfaces, folder))
