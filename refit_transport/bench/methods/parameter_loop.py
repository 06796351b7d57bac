"""What one writes first: tensor by tensor, gather the full tensor on the trainers and broadcast it over gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from refit_transport.bench.workload import BenchTensor, regions
from refit_transport.layout.region import Region

from .base import RankContext


class ParameterLoop:
    """The lowest trainer rank is the root; every inference rank gets every full tensor and keeps its part."""

    def __init__(self, context: RankContext, name: str) -> None:
        self._context = context
        self._root = min(context.config.trainers.ranks)
        self._trainers = tuple(sorted(context.config.trainers.ranks))
        self._receivers = (self._root, *sorted(set(context.config.engines.ranks) - {self._root}))
        self._steps = [self._step(tensor) for tensor in context.tensors]

    def publish(self) -> dict[str, Any]:
        return {}

    def connect(self, published: Mapping[int, dict[str, Any]]) -> None:
        self._gathering = self._context.gloo_group("loop-gather", self._trainers)
        self._broadcasting = self._context.gloo_group("loop-broadcast", self._receivers)
        largest = max(tensor.logical.nbytes for tensor in self._context.tensors)
        self._full = torch.zeros(largest, dtype=torch.uint8)
        self._part = torch.zeros(largest, dtype=torch.uint8)

    def run(self, version: int) -> dict[str, Any]:
        for tensor, owners, even in self._steps:
            full = _as(self._full, tensor, tensor.logical.shape)
            if self._gathering is not None:
                (self._all_gather if even else self._send_to_root)(tensor, owners, full)
            if self._broadcasting is not None:
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = 0, 0
                self._broadcasting.broadcast([full], options).wait()
            kept = self._context.sink.tensors.get(tensor.logical.name)
            if kept is not None:
                kept.copy_(full[self._context.sink.regions[tensor.logical.name].slices()])
        return {}

    def close(self) -> None:
        self._gathering = self._broadcasting = None

    def _step(self, tensor: BenchTensor) -> tuple[BenchTensor, dict[int, Region], bool]:
        """One owner per distinct region; whether all trainers own equally much, so that an all-gather fits."""
        held = regions(tensor.trainers, tensor.logical.shape)
        owners: dict[Region, int] = {}
        for rank in sorted(held):
            owners.setdefault(held[rank], rank)
        by_rank = {rank: region for region, rank in owners.items()}
        even = tuple(sorted(by_rank)) == self._trainers and len({region.numel for region in owners}) == 1
        return tensor, by_rank, even and len(self._trainers) > 1

    def _all_gather(self, tensor: BenchTensor, owners: dict[int, Region], full: torch.Tensor) -> None:
        """Straight into the full tensor where the shards are rows of it, by way of a buffer otherwise."""
        mine = self._context.source.tensors[tensor.logical.name]
        places = [full[owners[rank].slices()] for rank in self._trainers]
        if all(place.is_contiguous() for place in places):
            self._gathering.allgather([places], [mine]).wait()
            return
        stacked = _as(self._part, tensor, (len(places), *mine.shape))
        self._gathering.allgather([list(stacked)], [mine]).wait()
        for place, part in zip(places, stacked, strict=True):
            place.copy_(part)

    def _send_to_root(self, tensor: BenchTensor, owners: dict[int, Region], full: torch.Tensor) -> None:
        rank, root = self._context.rank, self._root
        if rank in owners and rank != root:
            self._gathering.send([self._context.source.tensors[tensor.logical.name]], 0, 0).wait()
        if rank != root:
            return
        for owner, region in owners.items():
            if owner == root:
                full[region.slices()].copy_(self._context.source.tensors[tensor.logical.name])
            else:
                part = _as(self._part, tensor, region.shape)
                self._gathering.recv([part], self._trainers.index(owner), 0).wait()
                full[region.slices()].copy_(part)


def _as(buffer: torch.Tensor, tensor: BenchTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The head of a byte buffer as a tensor of the trainers' dtype."""
    dtype = getattr(torch, tensor.logical.dtype)
    count = torch.Size(shape).numel()
    return buffer[: count * dtype.itemsize].view(dtype).view(shape)
