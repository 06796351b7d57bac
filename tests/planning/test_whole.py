"""Whole tensors and what is staged fit into two buckets together, wherever a tensor leaves room for that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.layout import Replicate, Shard
from refit_transport.planning import Plan, PlanOptions
from refit_transport.planning.plan import IN_FLIGHT
from refit_transport.planning.staged import staged_bytes
from refit_transport.planning.whole import Lifetime, busiest_layout, lay_out_whole
from tests.planning.sides import on_mesh, planned

BUCKET = 64 << 10
DOMAINS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def loaded_whole(rows: dict[str, int], **options) -> Plan:
    """Tensors of so many rows of 256 bytes, cut over four trainers, whole on four inference ranks of one domain."""
    source = {name: on_mesh((count, 128), range(4), [Shard(0)]) for name, count in rows.items()}
    sink = {name: on_mesh((count, 128), range(4, 8), [Replicate()]) for name, count in rows.items()}
    return planned(source, sink, DOMAINS, PlanOptions(bucket_bytes=BUCKET, stripe_bytes=1, **options), whole=True)


def taken(plan: Plan) -> int:
    return staged_bytes(plan) + busiest_layout(plan.groups, plan.buckets).nbytes


SMALL = {f"model.layers.{i}.weight": 32 for i in range(40)}
LARGE = {f"model.layers.{i}.weight": 80 for i in range(12)}
TWO_TABLES = {
    "lm_head.weight": 256,
    "model.embed_tokens.weight": 256,
    **{f"model.layers.{i}.weight": 16 for i in range(96)},
}


@pytest.mark.parametrize(
    "rows", [SMALL, LARGE, TWO_TABLES], ids=["many in a bucket", "larger", "two tables of a bucket"]
)
@pytest.mark.parametrize("root", ["single", "every"])
def test_staging_and_whole_tensors_fit_into_two_buckets(rows: dict[str, int], root: str) -> None:
    assert taken(loaded_whole(rows, broadcast_root=root)) <= 2 * BUCKET


def test_a_whole_tensor_of_two_buckets_comes_on_top_of_full_ones() -> None:
    plan = loaded_whole({"model.embed_tokens.weight": 512, **SMALL})
    assert busiest_layout(plan.groups, plan.buckets).spanning == 512 * 256
    assert 2 * BUCKET // 2 < staged_bytes(plan) <= 2 * BUCKET


def test_what_is_written_in_place_leaves_buckets_full() -> None:
    source = {name: on_mesh((count, 128), range(4), [Shard(0)]) for name, count in LARGE.items()}
    sink = {name: on_mesh((count, 128), range(4, 8), [Shard(1)]) for name, count in LARGE.items()}
    plan = planned(source, sink, DOMAINS, PlanOptions(bucket_bytes=BUCKET, stripe_bytes=1))
    assert busiest_layout(plan.groups, plan.buckets).nbytes == 0
    assert staged_bytes(plan) > 2 * BUCKET * 0.6


def test_tensors_that_span_buckets_are_spread_and_others_stay_in_travel_order() -> None:
    plan = loaded_whole(TWO_TABLES)
    where: dict[str, list[int]] = {}
    for at, bucket in enumerate(plan.buckets):
        for slab in bucket:
            where.setdefault(plan.parameters[plan.groups[slab.group].members[slab.member]].name, []).append(at)
    head, table = where.pop("lm_head.weight"), where.pop("model.embed_tokens.weight")
    assert head[-1] + IN_FLIGHT <= table[0]
    assert list(where.values()) == sorted(where.values())


lifetimes = st.dictionaries(
    st.integers(0, 99),
    st.builds(
        lambda first, more, nbytes: Lifetime(first, first + more, nbytes), *map(st.integers, (0, 0, 1), (30, 5, 500))
    ),
)


@given(lifetimes)
def test_no_two_tensors_share_memory_while_both_may_live(lives: dict[int, Lifetime]) -> None:
    layout = lay_out_whole(lives)
    assert set(layout.starts) == set(lives)
    spans = [(start, start + lives[key].nbytes, lives[key]) for key, start in layout.starts.items()]
    for number, (start, stop, life) in enumerate(spans):
        assert 0 <= start and stop <= layout.nbytes
        for other_start, other_stop, other in spans[:number]:
            apart = life.first >= other.last + IN_FLIGHT or other.first >= life.last + IN_FLIGHT
            assert apart or stop <= other_start or other_stop <= start
