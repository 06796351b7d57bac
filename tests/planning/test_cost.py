"""The cost model: the published layer table, the bound, and how each rate enters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from refit_transport.layout.layout import Cell, Entry, Layout, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.planning.cost import PHASES, lower_bound, predict
from refit_transport.planning.cost_traffic import measure
from refit_transport.planning.plan import IN_FLIGHT, Link, Plan, PlanOptions
from refit_transport.planning.planner import plan_refit
from refit_transport.planning.presets.clusters import CLUSTERS, Cluster
from refit_transport.planning.presets.models import MODELS
from refit_transport.planning.presets.parallel import Generation, Training
from refit_transport.report.plan_reference import layer_case, layer_cluster, layer_results
from refit_transport.report.plan_study import Job, study

PLAIN = Cluster(
    name="plain", node_ranks=4, domain_ranks=4, nic_rate=1e9, node_ports=4, domain_rate=10e9, copy_rate=1e12,
    network_efficiency=1, domain_efficiency=1, flow_loss=0, network_latency=0, domain_latency=0, message_overhead=0,
    bucket_overhead=0, load_seconds_per_tensor=0, source="test",
)  # fmt: skip
"""Rates that make times easy to compute by hand."""


@pytest.fixture(scope="module")
def table():
    return {result.row.replicas: result for result in layer_results()}


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_the_published_layer_times_are_met_within_15_percent(table, replicas: int) -> None:
    result = table[replicas]
    assert result.hierarchical == pytest.approx(result.row.hierarchical, rel=0.15)
    assert result.flat == pytest.approx(result.row.flat, rel=0.15)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_the_published_bound_is_met_exactly(table, replicas: int) -> None:
    assert round(table[replicas].bound, 2) == 8.96


def test_the_layer_table_uses_the_presets_constants_but_for_the_unit_of_the_port() -> None:
    assert replace(layer_cluster(), nic_rate=50e9) == CLUSTERS["dgx-gb200"]


def test_the_bound_of_the_layer_in_bytes_is_that_of_its_formula() -> None:
    source, sink, domains = layer_case(4)
    plan = plan_refit(source, sink, (LogicalParameter("experts.up_proj", (256, 2048, 7168), "bfloat16"),), domains)
    bound = lower_bound(plan, CLUSTERS["dgx-gb200"], source, range(16))
    nbytes, replicas, width = 256 * 2048 * 7168 * 2, 4, 8
    assert bound.send == pytest.approx(nbytes / (16 * 50e9))
    assert bound.receive == pytest.approx(nbytes / (width * replicas * 50e9))
    assert bound.in_domain == pytest.approx((replicas - 1) * nbytes / (width * replicas * 900e9))


MATRIX = LogicalParameter("w", (1024, 1024), "float32")
NBYTES = 1024 * 1024 * 4


def _case(sources: int, replicas: int, options: PlanOptions | None = None) -> tuple[Plan, SideDescription]:
    """Rows over ``sources`` trainers in one domain, to ``replicas`` full copies in another."""
    rows = 1024 // sources
    cells = [Cell(Region((rows * i, 0), (rows * i + rows, 1024)), (i,)) for i in range(sources)]
    copies = Cell(Region.whole(MATRIX.shape), tuple(range(sources, sources + replicas)))
    sides = [SideDescription((Layout(MATRIX.shape, tuple(c)),), (Entry("w", "float32", 0),)) for c in (cells, [copies])]
    domains = tuple(range(sources)), copies.ranks
    return plan_refit(*sides, (MATRIX,), domains, options), sides[0]


def _predict(plan: Plan, cluster: Cluster, sources: int, replicas: int, overlap: bool = True):
    receivers = range(sources, sources + replicas)
    return predict(plan, cluster, senders=range(sources), receivers=receivers, overlap=overlap)


def test_one_sender_to_one_receiver_takes_the_bytes_over_the_rate() -> None:
    plan, source = _case(1, 1)
    assert _predict(plan, PLAIN, 1, 1).phase_seconds["network"] == pytest.approx(NBYTES / 1e9)
    assert lower_bound(plan, PLAIN, source, range(1)).seconds == pytest.approx(NBYTES / 1e9)


def test_the_bound_is_never_above_the_prediction() -> None:
    for sources, replicas in ((1, 1), (2, 4), (4, 2), (4, 4)):
        plan, source = _case(sources, replicas)
        predicted = _predict(plan, PLAIN, sources, replicas).seconds
        assert lower_bound(plan, PLAIN, source, range(sources)).seconds <= predicted * (1 + 1e-9)


def test_a_port_shared_by_all_ranks_of_a_node_serves_them_in_turn() -> None:
    plan, source = _case(4, 4)
    shared = replace(PLAIN, node_ports=1)
    apart, together = (_predict(plan, c, 4, 4).phase_seconds["network"] for c in (PLAIN, shared))
    assert together == pytest.approx(4 * apart)
    assert lower_bound(plan, shared, source, range(4)).seconds == pytest.approx(NBYTES / 1e9)


@pytest.mark.parametrize(("rate", "phase"), [
    ("nic_rate", "network"), ("domain_rate", "in_domain"), ("copy_rate", "unpack"), ("copy_rate", "pack"),
])  # fmt: skip
def test_halving_a_rate_doubles_its_phase_and_no_other_link(rate: str, phase: str) -> None:
    plan, _ = _case(4, 4)
    fast = _predict(plan, PLAIN, 4, 4).phase_seconds
    slow = _predict(plan, replace(PLAIN, **{rate: getattr(PLAIN, rate) / 2}), 4, 4).phase_seconds
    assert slow[phase] == pytest.approx(2 * fast[phase])
    assert {p for p in PHASES if slow[p] != pytest.approx(fast[p])} <= {"pack", "unpack"} | {phase}


def test_overlapping_the_phases_of_several_buckets_saves_time() -> None:
    plan, _ = _case(4, 4, PlanOptions(bucket_bytes=1 << 20))
    assert len(plan.buckets) > 3
    slow = replace(PLAIN, copy_rate=1e9, domain_rate=1e9)
    overlapped, serial = (_predict(plan, slow, 4, 4, overlap=overlap).seconds for overlap in (True, False))
    assert overlapped < 0.8 * serial
    busiest = max(_predict(plan, slow, 4, 4).phase_seconds.values())
    assert overlapped >= busiest * (1 - 1e-9)


def test_the_time_line_keeps_the_order_of_phases_and_of_buckets() -> None:
    plan, _ = _case(4, 4, PlanOptions(bucket_bytes=1 << 20))
    spans = _predict(plan, PLAIN, 4, 4).timeline
    assert spans.shape == (len(plan.buckets), len(PHASES), 2)
    assert (spans[:, :, 1] >= spans[:, :, 0]).all()
    assert (np.diff(spans[:, :, 1], axis=0) >= -1e-12).all()
    assert (spans[IN_FLIGHT:, 0, 0] >= spans[:-IN_FLIGHT, -1, 1] - 1e-12).all(), "more buckets than there is memory for"


def test_sums_by_bucket_equal_a_walk_over_every_slab_and_transfer() -> None:
    job = Job(MODELS["qwen3-0.6b"], Training(tp=2, dp=2), Generation(tp=2, dp=2), replace(PLAIN, domain_ranks=4),
              options=PlanOptions(bucket_bytes=64 << 20))  # fmt: skip
    plan = study(job, ("ffn",), broadcast=False).main.plan
    traffic = measure(plan)
    walked = {link: 0.0 for link in Link}
    messages = 0
    for bucket in plan.buckets:
        pairs = set()
        for slab in bucket:
            group = plan.groups[slab.group]
            itemsize = {"bfloat16": 2, "float32": 4}[group.wire_dtype]
            for transfer in group.transfers:
                start, stop = transfer.region.start[group.slab_dim], transfer.region.stop[group.slab_dim]
                rows = max(0, min(stop, slab.stop) - max(start, slab.start))
                walked[transfer.link] += transfer.region.numel * rows / (stop - start) * itemsize
                if rows and transfer.src != transfer.dst:
                    pairs.add((transfer.src, transfer.dst, transfer.hop))
        messages += len(pairs)
    for link in Link:
        assert sum(b for (_, of), b in traffic.by_route.items() if of is link) == pytest.approx(walked[link])
        assert traffic.pairs[link].sum() == pytest.approx(walked[link])
        assert traffic.total(traffic.of_link(link)[0]).sum() == pytest.approx(walked[link], rel=1e-5)
    assert traffic.total(traffic.messages_out).sum() == messages


def test_staged_bytes_stay_within_two_buckets() -> None:
    plan, _ = _case(4, 4, PlanOptions(bucket_bytes=1 << 20))
    assert _predict(plan, PLAIN, 4, 4).peak_extra_bytes_per_rank <= 2 << 20


def test_gathering_and_broadcasting_is_limited_by_the_loader_when_tensors_are_many_and_links_fast() -> None:
    slow_loader = replace(CLUSTERS["dgx-h100"], load_seconds_per_tensor=1e-2)
    job = Job(MODELS["qwen3-0.6b"], Training(tp=2), Generation(tp=2), slow_loader)
    found = {o.transport: o.prediction for o in study(job, ("all",)).outcomes}
    assert "loader" in found["gather_broadcast"].limited_by
    assert found["nccl_reshard"].seconds < found["gather_broadcast"].seconds / 5


def test_colocated_sides_move_only_what_the_other_ranks_lack() -> None:
    job = Job(MODELS["qwen3-0.6b"], Training(tp=2), Generation(tp=2), CLUSTERS["dgx-h100"], colocated=True)
    predicted = study(job, ("all",), broadcast=False).main.prediction
    assert predicted.network_bytes == 0
    assert predicted.local_bytes > 0.8 * MODELS["qwen3-0.6b"].nbytes
