"""A weight source over plain tensors: a rank's holdings given as regions and the tensors that store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region

Holdings = Mapping[str, Sequence[tuple[Region, torch.Tensor]]]
"""Checkpoint name -> regions and the tensors (same shape, any strides) that store them."""


def region_view(rank_holds: Sequence[tuple[Region, torch.Tensor]], name: str, region: Region) -> torch.Tensor:
    """The part of a holding that stores ``region``. Raises ValueError when no holding contains it."""
    for held, tensor in rank_holds:
        if held.contains(region):
            return tensor[region.relative_to(held).slices()]
    raise ValueError(f"{name}: {region} is not held here; held are {', '.join(str(r) for r, _ in rank_holds)}")


class TensorSource:
    """Implements ``WeightSource``. ``shapes`` gives the global shape of every name in ``holdings``."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], holdings: Holdings) -> None:
        for name, held in holdings.items():
            for region, tensor in held:
                if tuple(tensor.shape) != region.shape:
                    raise ValueError(f"{name}: the tensor for {region} has shape {tuple(tensor.shape)}")
        self._holdings = {name: list(held) for name, held in holdings.items() if held}
        self._shapes = dict(shapes)

    def parameters(self) -> Sequence[LogicalParameter]:
        return [
            LogicalParameter(name, tuple(self._shapes[name]), str(held[0][1].dtype).removeprefix("torch."))
            for name, held in self._holdings.items()
        ]

    def holdings(self) -> Mapping[str, tuple[Region, ...]]:
        return {name: tuple(region for region, _ in held) for name, held in self._holdings.items()}

    def view(self, name: str, region: Region) -> torch.Tensor:
        return region_view(self._holdings[name], name, region)

    def refresh(self) -> bool:
        return False
