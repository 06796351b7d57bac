"""What NCCL M2N can express is found from layouts alone, with the mesh it becomes or the reason why it cannot."""

from __future__ import annotations

from itertools import product

import pytest

from refit_transport.layout.layout import Entry, Layout, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import region_layout
from refit_transport.planning import PlanOptions, compile_program, plan_refit
from refit_transport.planning.m2n import (
    Inexpressible,
    SideMesh,
    call_limit,
    choose_wires,
    communicator_order,
    express,
    make_stacks,
    sink_layout,
    wires_by_parameter,
    without_m2n,
)
from refit_transport.planning.plan import IN_FLIGHT
from refit_transport.planning.staged import staged_bytes
from refit_transport.planning.whole import busiest_layout

SHAPE = (12, 8)
PLACE = {rank: rank for rank in range(200)}


def cut(shape: tuple[int, ...], dim: int, holders: list[list[int]], edges: list[int] | None = None) -> Layout:
    """Shard i of ``dim`` is held by ``holders[i]``; equal shards unless ``edges`` says where they end."""
    size = shape[dim] // len(holders)
    edges = edges or [size * (i + 1) for i in range(len(holders))]
    held: dict[int, list[Region]] = {}
    for start, stop, ranks in zip([0, *edges], edges, holders):
        region = Region(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(stop if d == dim else extent for d, extent in enumerate(shape)),
        )
        for rank in ranks:
            held.setdefault(rank, []).append(region)
    return region_layout(shape, held)


def whole(shape: tuple[int, ...], ranks: list[int]) -> Layout:
    return region_layout(shape, {rank: [Region.whole(shape)] for rank in ranks})


@pytest.mark.parametrize(
    "source, sink, shape, meshes",
    [
        (cut(SHAPE, 0, [[0], [1]]), cut(SHAPE, 0, [[2], [3], [4]]), (1, 96), (((2,), 0, 1), ((3,), 0, 1))),
        (cut(SHAPE, 0, [[0], [1]]), cut(SHAPE, 1, [[2], [3]]), (1, 12, 8), (((2,), 0, 1), ((2,), 0, 2))),
        (cut(SHAPE, 1, [[0], [1]]), cut(SHAPE, 0, [[2], [3]]), (1, 12, 8), (((2,), 0, 2), ((2,), 0, 1))),
        (whole(SHAPE, [0, 1]), whole(SHAPE, [2, 3, 4]), (96,), (((2,), None, None), ((3,), None, None))),
        (whole(SHAPE, [0]), cut(SHAPE, 1, [[2], [3]]), (12, 8), (((1,), None, None), ((2,), 0, 1))),
        (cut(SHAPE, 0, [[0, 2], [1, 3]]), cut(SHAPE, 0, [[4], [5]]), (1, 96), (((2, 2), 1, 1), ((2,), 0, 1))),
        (cut(SHAPE, 0, [[0], [1]]), cut(SHAPE, 0, [[4, 5], [6, 7]]), (1, 96), (((2,), 0, 1), ((2, 2), 0, 1))),
        (
            cut((6, 4, 10, 3), 1, [[0], [1]]),
            cut((6, 4, 10, 3), 2, [[2], [3]]),
            (6, 4, 30),
            (((2,), 0, 1), ((2,), 0, 2)),
        ),
    ],
)
def test_layouts_become_meshes_and_dimensions_that_no_side_cuts_merge(source, sink, shape, meshes) -> None:
    geometry = express(source, sink, "bfloat16", PLACE)
    assert geometry.shape == shape
    assert tuple((m.dims, m.axis, m.dim) for m in (geometry.source, geometry.sink)) == meshes
    assert (geometry.source.start, geometry.sink.start) == (min(source.ranks), min(sink.ranks))


ROWS, COLUMNS = cut(SHAPE, 0, [[0], [1]]), cut(SHAPE, 1, [[2], [3]])
LONG = (1024,)


@pytest.mark.parametrize(
    "source, sink, dtype, reason",
    [
        (ROWS, COLUMNS, "bool", "dtype bool"),
        (ROWS, COLUMNS, "int16", "dtype int16"),
        (ROWS, cut(SHAPE, 1, [[1], [2]]), "float32", "rank 1 is on both sides"),
        (cut(SHAPE, 0, [[0], [1], [2]], [5, 10, 12]), cut(SHAPE, 1, [[3], [4]]), "float32", "not equal parts of 12"),
        (cut(SHAPE, 0, [[0], [2]]), cut(SHAPE, 1, [[3], [4]]), "float32", "source ranks are no interval"),
        (cut(SHAPE, 0, [[1], [0]]), COLUMNS, "float32", "not in the order of a mesh"),
        (cut(SHAPE, 0, [[0, 3], [1, 2]]), cut(SHAPE, 1, [[4], [5]]), "float32", "not in the order of a mesh"),
        (cut(SHAPE, 0, [[0, 2], [1]]), cut(SHAPE, 1, [[3], [4]]), "float32", "not in the order of a mesh"),
        (cut(SHAPE, 0, [[4], [5]]), COLUMNS, "float32", "destinations come before the sources"),
        (cut(SHAPE, 0, [[0], [1], [0]]), COLUMNS, "float32", "source rank holds several regions"),
        (
            region_layout(SHAPE, {0: [Region((0, 0), (6, 4))], 1: [Region((6, 4), (12, 8))]}),
            cut(SHAPE, 1, [[4], [5]]),
            "float32",
            "cuts dimensions 0, 1; M2N allows one",
        ),
        (
            cut(LONG, 0, [[r] for r in range(32)]),
            whole(LONG, [40]),
            "float32",
            "32 source shards meet one destination shard; M2N allows 16",
        ),
        (
            whole(LONG, [0]),
            cut(LONG, 0, [[r] for r in range(1, 129)]),
            "float32",
            "128 destination shards meet one source shard; M2N allows 64",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_says_why(source, sink, dtype, reason) -> None:
    with pytest.raises(Inexpressible, match=reason):
        express(source, sink, dtype, PLACE)


def test_sources_come_first_in_the_communicator() -> None:
    place = communicator_order([5, 1, 3], [0, 2, 3])
    assert place == {1: 0, 3: 1, 5: 2, 0: 3, 2: 4}
    geometry = express(cut(SHAPE, 0, [[1], [5]]), cut(SHAPE, 0, [[0], [2]]), "int8", {1: 0, 5: 1, 0: 2, 2: 3})
    assert (geometry.source, geometry.sink) == (SideMesh(0, (2,), 0, 1), SideMesh(2, (2,), 0, 1))


def planned(bucket_bytes: int = 4096, layers: int = 5, loader: bool = True):
    """Rows to columns, an uneven tensor, and one for the loader (or written in place), in several layers."""
    source, sink = cut(SHAPE, 0, [[0], [1]]), cut(SHAPE, 1, [[2], [3]])
    odd_source, odd_sink = cut((7, 4), 0, [[0], [1]], [4, 7]), cut((7, 4), 1, [[2], [3]])
    norm_source, norm_sink = whole((9,), [0, 1]), whole((9,), [2, 3])
    entries = [
        (f"model.layers.{layer}.{name}", index)
        for layer in range(layers)
        for index, name in enumerate(("mlp.up_proj.weight", "mlp.odd.weight", "norm.weight"))
    ]
    shapes = (SHAPE, (7, 4), (9,))
    sides = [
        SideDescription(layouts, tuple(Entry(n, "float32", i, whole=loader and engine and i == 2) for n, i in entries))
        for engine, layouts in enumerate(((source, odd_source, norm_source), (sink, odd_sink, norm_sink)))
    ]
    parameters = [LogicalParameter(name, shapes[index], "float32") for name, index in entries]
    plan = plan_refit(*sides, parameters, ((0, 1), (2, 3)), PlanOptions(bucket_bytes=bucket_bytes))
    by_shape = {SHAPE: source, (7, 4): odd_source, (9,): norm_source}
    return plan, [by_shape[group.shape] for group in plan.groups]


def test_each_parameter_has_a_wire_and_a_reason() -> None:
    plan, sources = planned()
    wires = wires_by_parameter(plan, choose_wires(plan, sources, PLACE))
    assert len(wires) == 15
    assert wires["model.layers.3.mlp.up_proj.weight"] == ("nccl_m2n", "2 shards on 2 ranks to 2 shards on 2 ranks")
    assert (
        wires["model.layers.3.mlp.odd.weight"][0] == "nccl"
        and "not equal parts" in wires["model.layers.3.mlp.odd.weight"][1]
    )
    assert wires["model.layers.3.norm.weight"] == ("nccl", "whole tensors, for the model's own loader")


def test_equal_geometries_are_stacked_up_to_the_bucket() -> None:
    plan, sources = planned(bucket_bytes=1200)
    stacks = make_stacks(plan, choose_wires(plan, sources, PLACE))
    assert [len(stack.members) for stack in stacks] == [5]  # 192 bytes each on a rank; a call has 1,072
    plan, sources = planned(bucket_bytes=600)
    stacks = make_stacks(plan, choose_wires(plan, sources, PLACE))
    assert [len(stack.members) for stack in stacks] == [2, 2, 1]
    for stack in stacks:
        for side in (stack.geometry.source, stack.geometry.sink):
            shape = stack.geometry.local_shape(side, len(stack.members))
            assert shape[0] == len(stack.members) and 4 * shape[0] * shape[1] * shape[2] <= 432
    assert [m for stack in stacks for m in stack.members] == sorted(m for stack in stacks for m in stack.members)


def test_a_shard_beyond_the_bucket_goes_point_to_point() -> None:
    plan, sources = planned(bucket_bytes=160)
    wires = wires_by_parameter(plan, choose_wires(plan, sources, PLACE))
    assert wires["model.layers.0.mlp.up_proj.weight"] == (
        "nccl",
        "one rank holds 192 bytes of it, more than the 160 for a call that `bucket_bytes` leaves",
    )


def test_calls_and_the_rest_are_staged_in_two_buckets() -> None:
    """The library stages a call once more; the rest shares the memory of the calls, whole tensors come on top."""
    seen = set()
    for bucket_bytes, loader in product((192, 220, 260, 320, 480, 1000, 4096), (True, False)):
        plan, sources = planned(bucket_bytes, loader=loader)
        choices = choose_wires(plan, sources, PLACE)
        limit, rest = call_limit(plan, choices), staged_bytes(without_m2n(plan, choices))
        whole = busiest_layout(plan.groups, plan.buckets).nbytes
        whole *= staged_bytes(plan) + whole <= 2 * bucket_bytes
        assert limit + max(limit if make_stacks(plan, choices) else 0, rest) + whole <= 2 * bucket_bytes
        assert all(s.geometry.nbytes * len(s.members) <= limit for s in make_stacks(plan, choices))
        seen.add((limit < bucket_bytes, bool(make_stacks(plan, choices))))
    assert {(False, True), (True, True), (True, False)} <= seen


def test_what_is_staged_is_counted_as_the_programs_do() -> None:
    for bucket_bytes in (220, 480, 4096):
        plan, _ = planned(bucket_bytes)
        programs = [compile_program(plan, rank) for rank in range(4)]
        staged = [
            sum(message.nbytes for message in (*bucket.sends, *bucket.recvs)) for p in programs for bucket in p.buckets
        ]
        assert staged_bytes(plan) == IN_FLIGHT * max(staged)


def test_the_rest_of_a_plan_compiles_and_moves_all_that_m2n_does_not() -> None:
    plan, sources = planned()
    choices = choose_wires(plan, sources, PLACE)
    rest = without_m2n(plan, choices)
    names = {rest.parameters[m].name.split(".", 3)[3] for group in rest.groups for m in group.members}
    assert names == {"mlp.odd.weight", "norm.weight"}
    for rank in range(4):
        wanted = compile_program(rest, rank).pieces.parameter
        assert {plan.parameters[p].shape for p in wanted.tolist()} <= {(7, 4), (9,)}
    everything = without_m2n(plan, [c for c in choose_wires(plan, [None] * len(plan.groups), PLACE)])
    assert everything.groups == plan.groups and everything.buckets == plan.buckets


def test_the_sink_layout_is_what_the_transfers_deliver() -> None:
    plan, _ = planned()
    (group,) = [g for g in plan.groups if g.shape == SHAPE]
    assert sink_layout(group) == cut(SHAPE, 1, [[2], [3]])
