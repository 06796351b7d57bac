"""Small refits described by who holds what, their planned programs, and contents that tell every element apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
import torch

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.layout import Entry, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import region_layout
from refit_transport.planning import Plan, PlanOptions, compile_program, plan_refit
from refit_transport.runtime.binding import Binding
from refit_transport.trainers.tensors import TensorSource

GUARD = 0xA5
Held = dict[int, list[Region]]


@dataclass(frozen=True)
class Tensor:
    """One checkpoint tensor and the regions that each rank holds of it."""

    name: str
    shape: tuple[int, ...]
    trainers: Held
    engines: Held
    dtype: str = "float32"
    engine_dtype: str = ""
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Case:
    tensors: tuple[Tensor, ...]
    domains: tuple[tuple[int, ...], ...]
    options: dict = field(default_factory=dict)
    strided: bool = False
    """Local tensors are columns of wider ones, as in a fused parameter."""
    transient: bool = False
    """Engines give views only while a tensor is under way, as for modules that are repacked once they are complete."""

    def plan(self) -> Plan:
        parameters = [LogicalParameter(t.name, t.shape, t.dtype) for t in self.tensors]
        sides = [self._describe("trainers"), self._describe("engines")]
        return plan_refit(*sides, parameters, self.domains, PlanOptions(**self.options))

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for domain in self.domains for rank in domain)

    def _describe(self, side: str) -> SideDescription:
        numbers, entries = {}, []
        for t in self.tensors:
            held, whole = getattr(t, side), side == "engines" and t.whole
            if whole:
                held = {rank: [Region.whole(t.shape)] for rank in held}
            number = numbers.setdefault(region_layout(t.shape, held), len(numbers))
            dtype = t.engine_dtype or t.dtype if side == "engines" else t.dtype
            entries.append(Entry(t.name, dtype, number, whole))
        return SideDescription(tuple(numbers), tuple(entries))


class Shards:
    """One rank's tensors of one side, each inside a guarded buffer."""

    def __init__(self, case: Case, side: str, rank: int) -> None:
        self.case = case
        self.held: dict[str, list[tuple[Region, torch.Tensor]]] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for t in case.tensors:
            dtype = getattr(torch, t.engine_dtype or t.dtype if side == "engines" else t.dtype)
            regions = getattr(t, side).get(rank, [])
            if regions:
                self.held[t.name] = [(region, self._guarded(region.shape, dtype)) for region in regions]

    def _guarded(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wide = (*shape[:-1], shape[-1] + 6) if shape and self.case.strided else shape
        raw = torch.full((prod(wide) * dtype.itemsize + 128,), GUARD, dtype=torch.uint8)
        inside = torch.zeros(wide, dtype=torch.bool)
        tensor = raw[64:-64].view(dtype).view(wide)
        if shape and self.case.strided:
            tensor, inside = tensor[..., 3:-3], inside[..., 3:-3]
        inside.fill_(True)
        owned = torch.zeros(raw.numel(), dtype=torch.bool)
        base = inside if inside._base is None else inside._base
        owned[64:-64] = base.reshape(-1, 1).expand(-1, dtype.itemsize).reshape(-1)
        self._buffers.append((raw, ~owned))
        return tensor

    def fill(self, version: int) -> None:
        for name, held in self.held.items():
            for region, tensor in held:
                tensor.copy_(contents(self.case, name, version)[region.slices()])

    def wrong(self, version: int) -> list[str]:
        """Names whose bytes are not those of ``version``, and ``guard`` when a byte beside a tensor changed."""
        found = []
        for name, held in self.held.items():
            for region, tensor in held:
                expected = contents(self.case, name, version)[region.slices()].to(tensor.dtype)
                if not torch.equal(_bits(tensor), _bits(expected)):
                    found.append(f"{name} {region}")
        if any((raw[outside] != GUARD).any() for raw, outside in self._buffers):
            found.append("guard")
        return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@lru_cache(maxsize=32)
def contents(case: Case, name: str, version: int) -> torch.Tensor:
    """The full tensor ``name`` at ``version`` in the trainers' dtype: from a 64-bit hash of (parameter, version, global
    index). Every bit pattern where no dtype changes, finite numbers where one does. Call it before ranks are forked and
    they need not compute it."""
    number, t = next((i, t) for i, t in enumerate(case.tensors) if t.name == name)
    dtype = getattr(torch, t.dtype)
    with np.errstate(over="ignore"):
        h = np.arange(prod(t.shape), dtype=np.uint64) + np.uint64(number << 48) + np.uint64(version << 32)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    hashed = torch.from_numpy(h.view(np.int64))
    if dtype == torch.bool:
        return (hashed & 1).to(torch.bool).view(t.shape)
    if t.engine_dtype not in ("", t.dtype):
        return (hashed.to(torch.float64) / 2**63).to(dtype).view(t.shape)
    return hashed.view(torch.uint8).view(-1, 8)[:, : dtype.itemsize].contiguous().view(dtype).view(t.shape)


class RepackingSink(TensorSink):
    """Its views are of fresh memory, which is gone once the tensor is complete."""

    def __init__(self, holdings: dict[str, list[tuple[Region, torch.Tensor]]]) -> None:
        super().__init__(holdings)
        self.transient = frozenset(holdings)
        self.open: dict[str, TensorSink] = {}
        self.most_open = 0

    def view(self, name: str, region: Region) -> torch.Tensor:
        if name not in self.open:
            fresh = [(held, torch.empty(tensor.shape, dtype=tensor.dtype)) for held, tensor in self._holdings[name]]
            self.open[name] = TensorSink({name: fresh})
            self.most_open = max(self.most_open, len(self.open))
        return self.open[name].view(name, region)

    def arrived(self, direct: Sequence[str], whole: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name in direct:
            fresh = self.open.pop(name)
            for region, tensor in self._holdings[name]:
                view = fresh.view(name, region)
                tensor.copy_(view)
                view.view(torch.uint8).fill_(GUARD) if view.dim() else view.zero_()
        super().arrived(direct, whole)


def bound_rank(case: Case, plan: Plan, rank: int) -> tuple[Shards, Shards, TensorSink, Binding]:
    """(what the rank trains, what it serves, its sink, the binding of both)."""
    trained, served = Shards(case, "trainers", rank), Shards(case, "engines", rank)
    source = TensorSource({t.name: t.shape for t in case.tensors}, trained.held) if trained.held else None
    sink = (RepackingSink if case.transient else TensorSink)(served.held) if served.held else None
    return trained, served, sink, Binding(plan, compile_program(plan, rank), source, sink)


def rows(shape: tuple[int, ...], ranks: list[int]) -> Held:
    """``ranks`` each hold an equal share of the rows (dimension 0)."""
    return _shares(shape, ranks, 0)


def columns(shape: tuple[int, ...], ranks: list[int]) -> Held:
    """``ranks`` each hold an equal share of the last dimension."""
    return _shares(shape, ranks, len(shape) - 1)


def everything(shape: tuple[int, ...], ranks: list[int]) -> Held:
    return {rank: [Region.whole(shape)] for rank in ranks}


def merged(*parts: Held) -> Held:
    return {rank: regions for part in parts for rank, regions in part.items()}


def _shares(shape: tuple[int, ...], ranks: list[int], dim: int) -> Held:
    step = -(-shape[dim] // len(ranks))
    held = {}
    for i, rank in enumerate(ranks):
        start, stop = [0] * len(shape), list(shape)
        start[dim], stop[dim] = min(i * step, shape[dim]), min((i + 1) * step, shape[dim])
        region = Region(tuple(start), tuple(stop))
        if not region.empty:
            held[rank] = [region]
    return held
