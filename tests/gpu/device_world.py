"""The world of the session's tests with its tensors on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from device_ranks import device

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "session"))
from ranks import SHAPES, EngineRank, World, values

from refit_transport.layout.region import Region

Held = dict[str, list[tuple[Region, torch.Tensor]]]


class DeviceWorld(World):
    def held_by_trainer(self, rank: int, version: int) -> Held:
        return _moved(super().held_by_trainer(rank, version))

    def held_by_engine(self, rank: int) -> Held:
        return _moved(super().held_by_engine(rank))


class DeviceEngineRank(EngineRank):
    def wrong(self, version: int) -> list[str]:
        return [
            name
            for name, parts in self.held.items()
            for region, tensor in parts
            if not torch.equal(tensor.cpu(), values(name, SHAPES[name], version)[region.slices()])
        ]


def _moved(held: Held) -> Held:
    return {name: [(region, tensor.to(device())) for region, tensor in parts] for name, parts in held.items()}
