"""The tensors of a benchmark, resolved: which rank of either side holds which box of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from refit_transport.layout.layout import ITEMSIZE, Entry, Layout, LogicalParameter, SideDescription
from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placements import Replicate, Shard
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import region_layout, shard_regions

from .config import BenchConfig, Side, Tensors
from .model import placed, scaled


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor on a mesh, as in PyTorch DTensor."""

    mesh: Mesh
    placements: tuple[Replicate | Shard, ...]


@dataclass(frozen=True, slots=True)
class BenchTensor:
    """One tensor of the benchmark and where both sides hold it."""

    logical: LogicalParameter
    engine_dtype: str
    trainers: Placement
    engines: Placement

    @property
    def wire_nbytes(self) -> int:
        """Bytes of the whole tensor in the narrower of the two dtypes."""
        return prod(self.logical.shape) * min(ITEMSIZE[self.logical.dtype], ITEMSIZE[self.engine_dtype])


def tensors_of(config: BenchConfig) -> tuple[BenchTensor, ...]:
    """Every tensor: families expanded, in the order of the configuration with outer repeat indices slowest, or those of
    the model in the order of its checkpoint."""
    if config.model:
        return tuple(_of_model(config))
    return tuple(tensor for family in config.tensors for tensor in _expand(family, config))


def _of_model(config: BenchConfig) -> Iterator[BenchTensor]:
    model = scaled(config.model)
    for tensor in model.tensors:
        trainers, engines = (_place(side, *placed(model, tensor, side)) for side in (config.trainers, config.engines))
        yield BenchTensor(tensor.parameter, tensor.dtype, trainers, engines)


def _expand(family: Tensors, config: BenchConfig) -> list[BenchTensor]:
    dtype = family.dtype
    expanded = []
    for index in product(*map(range, family.repeat.values())):
        at = dict(zip(family.repeat, index, strict=True))
        expanded.append(
            BenchTensor(
                LogicalParameter(family.name.format(**at), family.shape, dtype),
                family.engine_dtype or dtype,
                _place(config.trainers, family.trainers, family.repeat, at),
                _place(config.engines, family.engines, family.repeat, at),
            )
        )
    return expanded


def _place(side: Side, targets: Mapping[str, int | str], repeat: Mapping[str, int], at: Mapping[str, int]) -> Placement:
    """Axes that partition a repeat index pick one slice of the mesh; the others shard a dimension or replicate."""
    grid = np.array(side.ranks).reshape(tuple(side.mesh.values()))
    picks: list[int | slice] = []
    placements: list[Replicate | Shard] = []
    for axis, size in side.mesh.items():
        target = targets.get(axis)
        if isinstance(target, str):
            picks.append(at[target] * size // repeat[target])
        else:
            picks.append(slice(None))
            placements.append(Replicate() if target is None else Shard(target))
    chosen = grid[tuple(picks)]
    shape = tuple(chosen.shape) or (1,)
    return Placement(Mesh(shape, tuple(map(int, chosen.ravel()))), tuple(placements) or (Replicate(),))


@lru_cache(maxsize=4096)
def regions(placement: Placement, shape: tuple[int, ...]) -> Mapping[int, Region]:
    """The box each rank holds; ranks whose shard is empty are left out."""
    held = {}
    for rank, coordinate in placement.mesh:
        boxes = shard_regions(shape, placement.mesh, coordinate, placement.placements)
        held.update((rank, box) for box in boxes if not box.empty)
    return held


def describe(tensors: tuple[BenchTensor, ...], side: str, whole: frozenset[str] = frozenset()) -> SideDescription:
    """What all ranks of ``side`` (``trainers`` or ``engines``) hold, as the planner reads it. On the engine side the
    tensors named in ``whole`` are wanted in full by every rank that holds a part."""
    numbers: dict[Layout, int] = {}
    entries = []
    for tensor in tensors:
        shape, name = tensor.logical.shape, tensor.logical.name
        as_whole = name in whole
        layout = _layout(getattr(tensor, side), shape, as_whole)
        dtype = tensor.logical.dtype if side == "trainers" else tensor.engine_dtype
        entries.append(Entry(name, dtype, numbers.setdefault(layout, len(numbers)), as_whole))
    return SideDescription(tuple(numbers), tuple(entries))


@lru_cache(maxsize=4096)
def _layout(placement: Placement, shape: tuple[int, ...], whole: bool) -> Layout:
    held = regions(placement, shape)
    return region_layout(shape, {rank: [Region.whole(shape) if whole else box] for rank, box in held.items()})
