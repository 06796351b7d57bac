"""Buckets bound what a rank stages, keep all sources busy, and go through the model in order."""

from __future__ import annotations

import pytest

from refit_transport.layout import Replicate, Shard
from refit_transport.planning import Plan, PlanOptions, compile_program
from tests.planning.sides import on_mesh, planned

COPY, ROWS = [Replicate()], [Shard(0)]


def layer_of(plan: Plan, group: int, member: int) -> int:
    return int(plan.parameters[plan.groups[group].members[member]].name.split(".")[1])


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    """Four stages of four layers each, to two replicas of two ranks."""
    source = {f"layers.{i}.up": on_mesh((64, 32), [i // 4], COPY) for i in range(16)}
    sink = {name: on_mesh((64, 32), range(4, 8), [Replicate(), Shard(0)], (2, 2)) for name in source}
    options = PlanOptions(bucket_bytes=24 << 10, relay="never", stripe_bytes=1)
    return planned(source, sink, [[0], [1], [2], [3], [4, 5, 6, 7]], options)


def test_every_source_sends_in_every_bucket(pipeline: Plan) -> None:
    assert len(pipeline.buckets) == 4
    for bucket in pipeline.buckets:
        assert {int(pipeline.groups[slab.group].transfers.src[0]) for slab in bucket} == {0, 1, 2, 3}


def test_each_source_goes_through_its_layers_in_order(pipeline: Plan) -> None:
    seen: dict[int, list[int]] = {}
    for slab in (slab for bucket in pipeline.buckets for slab in bucket):
        layer = layer_of(pipeline, slab.group, slab.member)
        seen.setdefault(layer // 4, []).append(layer)
    assert all(layers == sorted(layers) for layers in seen.values())


@pytest.mark.parametrize("bucket_bytes", [600, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("whole", [False, True])
def test_no_rank_stages_more_than_the_budget(bucket_bytes: int, whole: bool) -> None:
    source = {f"layers.{i}.up": on_mesh((12, 16), range(3), ROWS) for i in range(4)}
    sink = {name: on_mesh((12, 16), range(3, 7), COPY) for name in source}
    options = PlanOptions(bucket_bytes=bucket_bytes, stripe_bytes=1)
    plan = planned(source, sink, [[0, 1, 2], [3, 4], [5, 6]], options, whole=whole)
    for rank in plan.world:
        for bucket in compile_program(plan, rank).buckets:
            assert sum(message.nbytes for message in (*bucket.sends, *bucket.recvs)) <= options.fill_bytes


def test_a_tensor_larger_than_a_bucket_is_cut_where_all_ranks_take_part() -> None:
    """Both sides cut rows, so slabs are cut by columns: every rank has a share of each slab."""
    source, sink = on_mesh((8, 4096), range(4), ROWS), on_mesh((8, 4096), range(4, 8), ROWS)
    plan = planned({"embed": source}, {"embed": sink}, [range(4), range(4, 8)], PlanOptions(bucket_bytes=8192))
    assert plan.groups[0].slab_dim == 1
    assert len(plan.buckets) == 4
    for rank in range(4):
        assert all(bucket.sends for bucket in compile_program(plan, rank).buckets)


def test_whole_tensors_are_announced_once_and_when_their_last_slab_is_there() -> None:
    source, sink = on_mesh((64, 64), [0], COPY), on_mesh((64, 64), [1, 2], COPY)
    plan = planned({"embed": source}, {"embed": sink}, [[0], [1, 2]], PlanOptions(bucket_bytes=4096), whole=True)
    announced = [bucket.whole for bucket in compile_program(plan, 1).buckets]
    assert len(announced) > 1
    assert announced[-1] == ((0, 64 * 64 * 2),)
    assert not any(announced[:-1])


def test_one_plan_may_write_a_parameter_directly_on_some_ranks_and_whole_on_others() -> None:
    from refit_transport.layout import Holding, LogicalParameter, Region, describe
    from refit_transport.planning import check_plan, plan_refit

    def held(rank: int, regions: tuple[Region, ...], whole: bool = False) -> list[Holding]:
        return [Holding(("w",), (8, 4), "bfloat16", regions, whole)]

    source = describe({0: held(0, (Region.whole((8, 4)),))})
    sink = describe({1: held(1, (Region((0, 0), (4, 4)),)), 2: held(2, (), whole=True)})
    plan = plan_refit(source, sink, [LogicalParameter("w", (8, 4), "bfloat16")], [[0], [1], [2]])
    check_plan(plan, source, sink)
    assert [group.whole for group in plan.groups] == [False, True]
