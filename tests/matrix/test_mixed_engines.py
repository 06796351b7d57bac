"""Engines that hold one tensor differently: directly beside whole, in one dtype beside another."""

from __future__ import annotations

import pytest
import torch
from in_memory_wire import InMemoryWire

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.layout import Entry, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import region_layout
from refit_transport.planning import PlanOptions, compile_program, plan_refit
from refit_transport.runtime.binding import Binding
from refit_transport.trainers.tensors import TensorSource

SHAPE = (8, 6)
HALVES = (Region((0, 0), (4, 6)), Region((4, 0), (8, 6)))
COLUMNS = (Region((0, 0), (8, 3)), Region((0, 3), (8, 6)))
ALL = Region.whole(SHAPE)
DIRECT, WHOLE = False, True


@pytest.mark.parametrize("domains", [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize(
    "engines",
    [
        ((DIRECT, "float32", COLUMNS[0]), (WHOLE, "float32", COLUMNS[1])),
        ((WHOLE, "float32", COLUMNS[0]), (DIRECT, "float32", COLUMNS[1])),
        ((DIRECT, "bfloat16", ALL), (WHOLE, "float32", ALL)),
        ((DIRECT, "bfloat16", ALL), (DIRECT, "float32", ALL)),
        ((DIRECT, "bfloat16", COLUMNS[1]), (DIRECT, "float16", ALL)),
        ((WHOLE, "float16", ALL), (WHOLE, "bfloat16", COLUMNS[0])),
    ],
)
def test_each_engine_holds_the_tensor_in_its_own_way(engines: tuple, domains: tuple) -> None:
    full = {name: torch.randn(SHAPE) for name in ("a", "b")}
    parameters = [LogicalParameter(name, SHAPE, "float32") for name in full]
    held = region_layout(SHAPE, {rank: [half] for rank, half in enumerate(HALVES)})
    layouts = tuple(
        region_layout(SHAPE, {2 + n: [ALL if whole else region]}) for n, (whole, _, region) in enumerate(engines)
    )
    plan = plan_refit(
        SideDescription((held,), tuple(Entry(name, "float32", 0) for name in full)),
        SideDescription(
            layouts, tuple(Entry(name, dtype, n, whole) for name in full for n, (whole, dtype, _) in enumerate(engines))
        ),
        parameters,
        domains,
        PlanOptions(bucket_bytes=400, stripe_bytes=1),
    )
    sources = [
        TensorSource(dict.fromkeys(full, SHAPE), {name: [(half, full[name][half.slices()].clone())] for name in full})
        for half in HALVES
    ]
    stored = [
        {name: [(region, torch.zeros(region.shape, dtype=getattr(torch, dtype)))] for name in full}
        for _, dtype, region in engines
    ]
    sinks = [
        TensorSink(tensors, frozenset(full) if whole else frozenset())
        for tensors, (whole, _, _) in zip(stored, engines, strict=True)
    ]
    sides = [*((source, None) for source in sources), *((None, sink) for sink in sinks)]
    bindings = {n: Binding(plan, compile_program(plan, n), *side) for n, side in enumerate(sides)}
    InMemoryWire(bindings).run(1)
    for tensors, (_, dtype, region) in zip(stored, engines, strict=True):
        for name in full:
            assert torch.equal(tensors[name][0][1], full[name][region.slices()].to(getattr(torch, dtype)))
