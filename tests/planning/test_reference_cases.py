"""The published cases: which regions go where, over which links."""

from __future__ import annotations

import pytest

from refit_transport.layout import Region, Replicate, Shard, region_layout
from refit_transport.planning import Link, PlanOptions
from tests.planning.sides import bytes_by_rank, on_mesh, pairs, planned

ROWS, COLUMNS, COPY = [Shard(0)], [Shard(1)], [Replicate()]
RELAY = PlanOptions(stripe_bytes=1, relay="always")


def test_rows_over_two_to_columns_over_four_sends_a_4x2_region_from_each_source_to_each_destination() -> None:
    source, sink = on_mesh((8, 8), [0, 1], ROWS), on_mesh((8, 8), [2, 3, 4, 5], COLUMNS)
    plan = planned({"w": source}, {"w": sink}, [[0, 1], [2, 3, 4, 5]])
    found = {(t.src, t.dst): t.region for t in plan.groups[0].transfers}
    assert found == {(s, 2 + d): Region((4 * s, 2 * d), (4 * s + 4, 2 * d + 2)) for s in range(2) for d in range(4)}


def test_tp4_to_two_replicas_of_tp2_in_one_domain_crosses_the_network_four_times() -> None:
    source = on_mesh((8, 8), range(4), ROWS)
    sink = on_mesh((8, 8), range(4, 8), [Replicate(), Shard(0)], (2, 2))
    plan = planned({"w": source}, {"w": sink}, [range(4), range(4, 8)])
    assert len(pairs(plan, Link.NETWORK)) == 4
    assert len(pairs(plan, Link.DOMAIN)) == 4
    flat = planned({"w": source}, {"w": sink}, [range(4), range(4, 8)], PlanOptions(once_per_domain=False))
    assert len(pairs(flat, Link.NETWORK)) == 8


def test_eight_source_replicas_share_the_sending_to_one_destination() -> None:
    source, sink = on_mesh((64, 8), range(8), COPY), on_mesh((64, 8), [8], COPY)
    plan = planned({"w": source}, {"w": sink}, [range(8), [8]])
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent[:8].tolist() == [128.0] * 8


def test_tensors_too_small_to_cut_are_dealt_out_over_the_replicas() -> None:
    sizes = range(1000, 1064)
    source = {f"norm.{size}": on_mesh((size,), range(8), COPY) for size in sizes}
    sink = {f"norm.{size}": on_mesh((size,), [8], COPY) for size in sizes}
    plan = planned(source, sink, [range(8), [8]], PlanOptions())
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert len(pairs(plan, Link.NETWORK)) == 64, "none is cut"
    assert sent[:8].max() <= 1.05 * sent[:8].mean()


def test_each_of_three_domains_is_reached_once_whatever_its_number_of_replicas() -> None:
    """Replicas 1, 2 and 3 of a tensor in domains of 1, 2 and 3 ranks: three copies cross the network."""
    source, sink = on_mesh((12, 4), range(6), ROWS), on_mesh((12, 4), range(6, 12), COPY)
    plan = planned({"w": source}, {"w": sink}, [range(6), [6], [7, 8], [9, 10, 11]])
    sent, received = bytes_by_rank(plan, Link.NETWORK)
    assert sent.sum() == 3 * 96
    assert received[6:].tolist() == [96, 48, 48, 32, 32, 32]


def test_relay_goes_from_domain_to_domain_and_forwards_what_was_received() -> None:
    source = on_mesh((8, 8), [0, 1], ROWS)
    sink = on_mesh((8, 8), range(2, 8), [Replicate(), Shard(0)], (3, 2))
    plan = planned({"w": source}, {"w": sink}, [[0, 1], [2, 3], [4, 5], [6, 7]], RELAY)
    assert bytes_by_rank(plan, Link.NETWORK)[0][:2].tolist() == [64, 64]
    assert sorted({t.hop for t in plan.groups[0].transfers}) == [0, 1, 2]


@pytest.mark.parametrize(("trainers", "copies"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_relay_is_used_only_as_far_as_the_trainers_are_the_bottleneck(trainers: int, copies: int) -> None:
    """Four domains of one rank each: n trainers can feed n of them while the first is still receiving."""
    source = on_mesh((16, 4), range(trainers), ROWS)
    engines = range(trainers, trainers + 4)
    plan = planned(
        {"w": source}, {"w": on_mesh((16, 4), engines, COPY)}, [range(trainers), *([rank] for rank in engines)]
    )
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent[:trainers].sum() == copies * 128


def test_pipeline_stages_send_their_own_layers_and_expert_ranks_their_own_experts() -> None:
    """PP2 x EP2 to one engine of expert parallelism 2: every expert moves once, straight to its place."""
    source, sink = {}, {}
    for layer in range(2):
        for expert in range(4):
            name = f"layers.{layer}.experts.{expert}.up"
            source[name] = on_mesh((4, 4), [2 * layer + expert // 2], COPY)
            sink[name] = on_mesh((4, 4), [4 + expert // 2], COPY)
    plan = planned(source, sink, [[0], [1], [2], [3], [4], [5]])
    assert pairs(plan, Link.NETWORK) == [(0, 4), (1, 5), (2, 4), (3, 5)]


def test_a_rank_on_both_sides_copies_and_its_domain_lends_over_the_fast_link() -> None:
    source = on_mesh((8, 8), range(4), ROWS)
    sink = on_mesh((8, 8), range(4), [Replicate(), Shard(0)], (2, 2))
    plan = planned({"w": source}, {"w": sink}, [[0, 1], [2, 3]])
    assert pairs(plan, Link.LOCAL) == [(0, 0), (3, 3)]
    assert pairs(plan, Link.DOMAIN) == [(1, 0), (2, 3)]
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent.sum() == 2 * 64, "rows 4:8 into the first domain and 0:4 into the second"


@pytest.mark.parametrize("size", [1, 2, 5, 7, 13])
def test_uneven_and_empty_shards_arrive_completely(size: int) -> None:
    source, sink = on_mesh((size, 3), range(4), ROWS), on_mesh((size, 3), range(4, 7), ROWS)
    planned({"w": source}, {"w": sink}, [range(4), range(4, 7)])


def test_a_fused_holding_of_several_regions_is_a_layout_like_any_other() -> None:
    held = {0: [Region((0,), (4,)), Region((8,), (12,))], 1: [Region((4,), (8,)), Region((12,), (16,))]}
    plan = planned({"qkv": region_layout((16,), held)}, {"qkv": on_mesh((16,), [2, 3], ROWS)}, [[0, 1], [2, 3]])
    assert len(plan.groups[0].transfers) == 4


def test_a_single_root_gathers_and_then_broadcasts_in_a_ring_over_the_domains() -> None:
    source, sink = on_mesh((8, 8), range(2), ROWS), on_mesh((8, 8), range(2, 8), COPY)
    options = PlanOptions(stripe_bytes=1, broadcast_root="single")
    plan = planned({"w": source}, {"w": sink}, [[0], [1], [2, 3], [4, 5], [6, 7]], options, whole=True)
    sent, received = bytes_by_rank(plan, Link.NETWORK)
    assert received[0] == 64, "the other trainer's half"
    assert sent[0] == 128, "one copy, whatever the number of domains"
    assert received[2:].tolist() == [64] * 6


def test_with_every_root_all_trainers_share_the_sending_of_whole_tensors() -> None:
    source, sink = on_mesh((8, 8), range(2), ROWS), on_mesh((8, 8), range(2, 6), COPY)
    options = PlanOptions(stripe_bytes=1, relay="never")
    plan = planned({"w": source}, {"w": sink}, [[0], [1], [2, 3], [4, 5]], options, whole=True)
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent[0] == sent[1] == 128


@pytest.mark.parametrize(("ports", "copies_sent"), [("rank", 2), ("domain", 1)])
def test_copies_are_relayed_where_trainers_share_a_port_that_would_carry_them_twice(
    ports: str, copies_sent: int
) -> None:
    """Four trainers' own ports carry two copies as fast as two receiving ranks take one; a shared port does not."""
    source, sink = on_mesh((16, 8), range(4), ROWS), on_mesh((16, 8), range(4, 8), [Replicate(), Shard(1)], (2, 2))
    options = PlanOptions(stripe_bytes=1, network_ports=ports)
    plan = planned({"w": source}, {"w": sink}, [range(4), [4, 5], [6, 7]], options)
    sent, received = bytes_by_rank(plan, Link.NETWORK)
    held = 16 * 8 * 2
    assert sent[:4].sum() == copies_sent * held
    assert received[4:6].sum() == received[6:].sum() == held
    assert sent[4:].sum() == (2 - copies_sent) * held
