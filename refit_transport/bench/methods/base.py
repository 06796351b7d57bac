"""What a benchmark asks of a transport, on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from refit_transport.bench.config import BenchConfig
from refit_transport.bench.holdings import Shards
from refit_transport.bench.workload import BenchTensor


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Network interfaces of a rank: for peers in its domain, and for all others. ``address`` reaches the latter."""

    domain: str
    network: str
    address: str


LOOPBACK = Interfaces("lo", "lo", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a benchmark as its methods see it."""

    rank: int
    config: BenchConfig
    tensors: tuple[BenchTensor, ...]
    source: Shards
    sink: Shards
    interfaces: Interfaces
    folder: Path
    """Shared by all ranks; for rendezvous and checkpoints."""

    def gloo_group(self, name: str, ranks: tuple[int, ...], version: int = 0) -> dist.ProcessGroup | None:
        """A gloo group of its own over joint ``ranks``, on the fast network when all are in one domain; None for a rank
        that is not in it."""
        if self.rank not in ranks:
            return None
        inside = any(set(ranks) <= set(domain) for domain in self.config.cluster.domains)
        options = dist.ProcessGroupGloo._Options()
        interface = self.interfaces.domain if inside else self.interfaces.network
        options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        options._threads = 2
        store = dist.FileStore(str(self.folder / f"store-{name}"), len(ranks))
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options)


class Method(Protocol):
    """``publish`` and ``connect`` once on every rank, then ``run`` per refit."""

    def publish(self) -> dict[str, Any]:
        """What the other ranks must know, as plain data."""

    def connect(self, published: Mapping[int, dict[str, Any]]) -> None:
        """Reach the others and allocate what refits will use."""

    def run(self, version: int) -> dict[str, Any]:
        """Move ``version`` from source to sink. Returns what the method counted itself, as plain data."""

    def close(self) -> None: ...
