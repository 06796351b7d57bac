"""A weight sink over plain tensors: the part of a checkpoint that a rank keeps, written directly or by copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region

from .base import SinkDescription

Holdings = Mapping[str, Sequence[tuple[Region, torch.Tensor]]]
"""Checkpoint name -> regions and the tensors (same shape, any strides) that store them."""


class TensorSink:
    """Implements ``WeightSink``. Names in ``whole`` always come as full tensors, of which the rank keeps its regions,
    as a model's own loader would."""

    transient: frozenset[str] = frozenset()

    def __init__(self, holdings: Holdings, whole: frozenset[str] = frozenset()) -> None:
        for name, held in holdings.items():
            for region, tensor in held:
                if tuple(tensor.shape) != region.shape:
                    raise ValueError(f"{name}: the tensor for {region} has shape {tuple(tensor.shape)}")
        self._holdings = {name: list(held) for name, held in holdings.items() if held}
        self._whole = whole
        self._missing: set[str] = set()
        self.version: int | None = None
        """The complete version that this rank holds; None while it is stale or being updated."""

    def describe(self, parameters: Sequence[LogicalParameter], direct: frozenset[str]) -> SinkDescription:
        names = {p.name for p in parameters}
        unwritten = sorted(self._holdings.keys() - names)
        if unwritten:
            raise ValueError(f"no trainer holds {', '.join(unwritten)}, which this rank needs")
        straight = {name for name in self._holdings if name in direct and name not in self._whole}
        return SinkDescription(
            direct={name: tuple(region for region, _ in self._holdings[name]) for name in sorted(straight)},
            whole=frozenset(self._holdings.keys() - straight),
            ignored=frozenset(names - self._holdings.keys()),
            dtypes={name: str(held[0][1].dtype).removeprefix("torch.") for name, held in self._holdings.items()},
            reasons={name: "kept by copying" for name in sorted(direct & self._whole & self._holdings.keys())},
        )

    def begin(self, version: int) -> bool:
        self.version = None
        self._missing = set(self._holdings)
        return False

    def view(self, name: str, region: Region) -> torch.Tensor:
        for held, tensor in self._holdings[name]:
            if held.contains(region):
                return tensor[region.relative_to(held).slices()]
        raise ValueError(f"{name}: {region} is not stored here")

    def arrived(self, direct: Sequence[str], whole: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._missing.difference_update(direct)
        for name, full in whole:
            for region, tensor in self._holdings[name]:
                tensor.copy_(full[region.slices()])
            self._missing.discard(name)

    def commit(self, version: int) -> None:
        """Raises RuntimeError when a tensor did not arrive."""
        if self._missing:
            raise RuntimeError(f"version {version} is incomplete: {', '.join(sorted(self._missing))} did not arrive")
        self.version = version

    def abort(self) -> None:
        self.version = None
