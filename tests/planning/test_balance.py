"""Sending and receiving are shared so that the busiest rank does no more than it must."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.layout import Replicate, Shard
from refit_transport.planning import Link, PlanOptions
from refit_transport.planning.balance import fair_fractions, water_fill
from tests.planning.sides import bytes_by_rank, on_mesh, planned

LARGE = PlanOptions(relay="never", stripe_bytes=4096)
"""Stripes as small against these tensors as the default is against those of a large model."""


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0.1, 100))
def test_water_filling_raises_the_lowest_loads_to_one_level(loads: list[float], amount: float) -> None:
    before = np.array(loads)
    after = before + water_fill(before, amount)
    assert np.isclose(after.sum() - before.sum(), amount)
    level = after[after > before + 1e-9].max()
    assert (after[after > before + 1e-9] >= level - 1e-6).all()
    assert (before[after <= before + 1e-9] >= level - 1e-6).all()


@given(
    st.dictionaries(
        st.sets(st.integers(0, 5), min_size=1, max_size=4).map(lambda s: tuple(sorted(s))),
        st.floats(1, 100),
        min_size=1,
        max_size=8,
    )
)
def test_no_set_of_ranks_is_busier_than_the_bytes_that_only_it_can_take(demand: dict[tuple[int, ...], float]) -> None:
    """The least possible peak is the densest set of ranks: the bytes that no rank outside can take, per rank."""
    loads = np.zeros(6)
    for candidates, fractions in fair_fractions(demand).items():
        assert np.isclose(fractions.sum(), 1)
        loads[list(candidates)] += fractions * demand[candidates]
    bound = max(
        sum(amount for candidates, amount in demand.items() if set(candidates) <= ranks) / len(ranks)
        for ranks in ({r for r in range(6) if mask >> r & 1} for mask in range(1, 64))
    )
    assert loads.max() <= 1.02 * bound


SENDING = [
    pytest.param((512, 512), 8, [Replicate()], (), 1, [Replicate()], (), id="8 replicas to 1 rank"),
    pytest.param((512, 512), 8, [Replicate(), Shard(0)], (4, 2), 2, [Shard(1)], (), id="4 replicas of 2 to 2"),
    pytest.param((512, 512), 6, [Replicate(), Shard(0)], (3, 2), 4, [Shard(0)], (), id="3 replicas of 2 to 4"),
    pytest.param((509, 512), 7, [Replicate()], (), 3, [Shard(0)], (), id="prime rows, 7 replicas to 3"),
    pytest.param((512, 512), 5, [Replicate()], (), 8, [Replicate(), Shard(0)], (2, 4), id="5 replicas to 2 of 4"),
    pytest.param((64, 64, 64), 6, [Replicate(), Shard(2)], (2, 3), 4, [Shard(1)], (), id="3-D"),
]


@pytest.mark.parametrize(("shape", "trainers", "held", "mesh", "engines", "needed", "sink_mesh"), SENDING)
def test_the_busiest_sender_and_receiver_are_within_five_percent_of_the_mean(
    shape: tuple[int, ...],
    trainers: int,
    held: list[object],
    mesh: tuple[int, ...],
    engines: int,
    needed: list[object],
    sink_mesh: tuple[int, ...],
) -> None:
    world = trainers + engines
    plan = planned(
        {"w": on_mesh(shape, range(trainers), held, mesh)},
        {"w": on_mesh(shape, range(trainers, world), needed, sink_mesh)},
        [range(trainers), range(trainers, world)],
        LARGE,
        check=False,
    )
    sent, received = bytes_by_rank(plan, Link.NETWORK)
    assert sent[:trainers].max() <= 1.05 * sent[:trainers].mean()
    assert received[trainers:].max() <= 1.05 * received[trainers:].mean()


def test_replicas_make_up_for_what_others_must_send_elsewhere() -> None:
    """Rank 0 alone holds one tensor; the one that both hold is sent by rank 1."""
    source = {"a": on_mesh((512, 512), [0], [Replicate()]), "b": on_mesh((512, 512), [0, 1], [Replicate()])}
    sink = {name: on_mesh((512, 512), [2], [Replicate()]) for name in source}
    plan = planned(source, sink, [[0, 1], [2]], check=False)
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent[0] == sent[1]


def test_a_domain_whose_ranks_hold_different_tensors_receives_evenly() -> None:
    """Ranks 1 and 2 share one tensor while 2 alone needs another: the shared one comes in through rank 1."""
    source = {name: on_mesh((512, 512), [0], [Replicate()]) for name in "ab"}
    sink = {"a": on_mesh((512, 512), [1, 2], [Replicate()]), "b": on_mesh((512, 512), [2], [Replicate()])}
    plan = planned(source, sink, [[0], [1, 2]], check=False)
    _, received = bytes_by_rank(plan, Link.NETWORK)
    assert received[1] == received[2]


def test_network_bytes_are_what_each_domain_needs_and_does_not_hold() -> None:
    source = on_mesh((64, 64), range(8), [Replicate(), Shard(0)], (2, 4))
    sink = on_mesh((64, 64), range(4, 12), [Replicate(), Shard(1)], (2, 4))
    domains = [range(4), range(4, 8), range(8, 12)]
    plan = planned({"w": source}, {"w": sink}, domains)
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent.sum() == 64 * 64 * 2, "ranks 4 to 7 hold all rows among them, ranks 8 to 11 none"


def test_many_holders_each_serve_few_domains() -> None:
    """16 replicas to 8 domains: two senders each, and not 16."""
    source = on_mesh((512, 512), range(16), [Replicate()])
    sink = on_mesh((512, 512), range(16, 24), [Replicate()])
    domains = [range(16), *([rank] for rank in range(16, 24))]
    plan = planned({"w": source}, {"w": sink}, domains, LARGE, check=False)
    assert len(plan.groups[0].transfers) == 16
    sent, _ = bytes_by_rank(plan, Link.NETWORK)
    assert sent[:16].min() == sent[:16].max()


def test_overloaded_holders_alone_are_relayed_for_and_domains_take_turns() -> None:
    """Rank 0 holds three quarters of the bytes, so that its copies are relayed; those of ranks 1 to 3 are not."""
    source = {f"heavy.{i}": on_mesh((512, 100 + i), [0], [Replicate()]) for i in range(6)}
    source |= {f"light.{i}": on_mesh((512, 64), [i], [Replicate()]) for i in range(1, 4)}
    sink = {name: on_mesh(layout.shape, range(4, 8), [Replicate()]) for name, layout in source.items()}
    plan = planned(source, sink, [range(4), [4], [5], [6], [7]], PlanOptions())
    hops = {plan.parameters[g.members[0]].name: int(g.transfers.hop.max()) for g in plan.groups}
    assert {hop for name, hop in hops.items() if name.startswith("light")} == {0}
    assert max(hop for name, hop in hops.items() if name.startswith("heavy")) >= 1
    relayed, _ = bytes_by_rank(plan, Link.NETWORK)
    assert np.count_nonzero(relayed[4:]) >= 3
