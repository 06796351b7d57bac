"""Runs the bound programs of all ranks in one process: every message is copied from its sender to its receiver."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import BoundMessage
from refit_transport.runtime.staging import Staging
from refit_transport.wires.base import WireStats
from refit_transport.wires.lockstep import hops_of


class InMemoryWire:
    """All ranks' ends at once. Ranks with ``direct_bytes`` None stage everything; else, larger contiguous pieces travel
    from and into live tensors."""

    def __init__(self, bindings: Mapping[int, Binding], direct_bytes: int | None = None) -> None:
        self.bindings = bindings
        self._staging = {rank: Staging(direct_bytes=direct_bytes) for rank in bindings}

    def run(self, version: int) -> dict[int, WireStats]:
        """One refit of every rank, in lock step; what each rank moved. Raises AssertionError when the two ends of a
        message do not agree."""
        for rank, binding in self.bindings.items():
            binding.begin(version)
            binding.bind(self._staging[rank])
        stats = {rank: WireStats() for rank in self.bindings}
        hops = max(hops_of(binding.plan) for binding in self.bindings.values())
        for bucket in range(max(len(binding.buckets) for binding in self.bindings.values())):
            self._pack(bucket, stats)
            for hop in range(hops + 1):
                self._exchange(bucket, hop, stats)
            self._unpack(bucket)
        for binding in self.bindings.values():
            if binding.sink is not None:
                binding.sink.commit(version)
        return stats

    def _pack(self, bucket: int, stats: dict[int, WireStats]) -> None:
        for rank, binding in self.bindings.items():
            bound = binding.buckets[bucket]
            bound.pack.run()
            bound.local.run()
            copied = sum(target.numel() * source.itemsize for target, source in zip(bound.local.dst, bound.local.src))
            stats[rank].sent["local"] += copied
            stats[rank].received["local"] += copied

    def _exchange(self, bucket: int, hop: int, stats: dict[int, WireStats]) -> None:
        sent = {
            (rank, message.peer): message
            for rank, binding in self.bindings.items()
            for message in binding.buckets[bucket].sends
            if message.hop == hop
        }
        for rank, binding in self.bindings.items():
            for message in binding.buckets[bucket].recvs:
                if message.hop == hop:
                    counterpart = sent.pop((message.peer, rank))
                    moved, link = _copy(counterpart, message), message.link.name.lower()
                    assert counterpart.link is message.link
                    stats[message.peer].sent[link] += moved
                    stats[rank].received[link] += moved
                    stats[message.peer].messages += 1
        assert not sent, f"bucket {bucket}, hop {hop}: nobody receives {sorted(sent)}"

    def _unpack(self, bucket: int) -> None:
        for binding in self.bindings.values():
            bound = binding.buckets[bucket]
            for message in bound.recvs:
                message.unpack.run()
            if binding.sink is not None and (bound.direct or bound.whole):
                binding.sink.arrived(bound.direct, bound.whole)


def _copy(sent: BoundMessage, received: BoundMessage) -> int:
    """Copy a message run by run, whose ends may be cut differently; returns its bytes."""
    sources, targets = list(sent.segments), list(received.segments)
    total = sum(s.numel() for s in sources)
    assert total == sum(t.numel() for t in targets) == sent.nbytes == received.nbytes
    while sources:
        source, target = sources.pop(0), targets.pop(0)
        size = min(source.numel(), target.numel())
        target[:size].copy_(source[:size])
        sources[:0] = _rest(source, size)
        targets[:0] = _rest(target, size)
    return total


def _rest(run: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [run[size:]] if run.numel() > size else []
