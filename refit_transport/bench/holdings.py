"""What one rank of a benchmark has in memory: its shards of either side, filled and checked against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refit_transport.layout.region import Region

from . import oracle
from .workload import BenchTensor, regions


class Shards:
    """One rank's shards of one side (``trainers`` or ``engines``), each contiguous, allocated and touched once."""

    def __init__(self, tensors: Sequence[BenchTensor], side: str, rank: int) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.regions: dict[str, Region] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for tensor in tensors:
            name, shape = tensor.logical.name, tensor.logical.shape
            region = regions(getattr(tensor, side), shape).get(rank)
            if region is not None:
                dtype = tensor.logical.dtype if side == "trainers" else tensor.engine_dtype
                self.shapes[name], self.regions[name] = shape, region
                self.tensors[name] = torch.zeros(region.shape, dtype=getattr(torch, dtype))

    def fill(self, version: int) -> None:
        for name, tensor in self.tensors.items():
            oracle.fill(tensor, name, self.regions[name], self.shapes[name], version)

    def wrong(self, version: int) -> list[str]:
        """Names whose contents are not exactly those of ``version``."""
        return [
            name
            for name, tensor in self.tensors.items()
            if not oracle.matches(tensor, name, self.regions[name], self.shapes[name], version)
        ]

    def held(self) -> dict[str, list[tuple[Region, torch.Tensor]]]:
        """By name, as ``TensorSource`` and ``TensorSink`` take it."""
        return {name: [(self.regions[name], tensor)] for name, tensor in self.tensors.items()}
