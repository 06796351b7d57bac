"""The order of actions of a lock-step refit: complete, within its slots, overlapping, free of deadlock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_transport.runtime.staging import SLOTS
from refit_transport.wires.schedule import Action, Pack, Post, Unpack, Wait, schedule

BUCKETS, HOPS, IN_ORDER = st.integers(0, 12), st.integers(0, 7), st.booleans()


def actions(buckets: int, hops: int, in_order: bool) -> list[Action]:
    return list(schedule(buckets, hops, in_order=in_order))


@given(BUCKETS, HOPS, IN_ORDER)
def test_everything_is_packed_posted_waited_for_and_unpacked_once(buckets: int, hops: int, in_order: bool) -> None:
    order = actions(buckets, hops, in_order)
    items = {(bucket, hop) for bucket in range(buckets) for hop in range(hops + 1)}
    for kind in (Post, Wait):
        assert Counter(item for a in order if isinstance(a, kind) for item in a.group) == Counter(items)
    for kind in (Pack, Unpack):
        assert [a.bucket for a in order if isinstance(a, kind)] == list(range(buckets))
    assert {a.group for a in order if isinstance(a, Post)} == {a.group for a in order if isinstance(a, Wait)}
    assert all(a.group for a in order if isinstance(a, Post))


@given(BUCKETS, HOPS, IN_ORDER)
def test_no_byte_is_used_before_it_is_there_and_no_slot_before_it_is_free(
    buckets: int, hops: int, in_order: bool
) -> None:
    packed: set[int] = set()
    unpacked: set[int] = set()
    posted: set[tuple[int, int]] = set()
    arrived: set[tuple[int, int]] = set()
    for action in actions(buckets, hops, in_order):
        match action:
            case Pack(bucket):
                assert bucket < SLOTS or bucket - SLOTS in unpacked, "the slot still belongs to an earlier bucket"
                packed.add(bucket)
            case Post(group):
                for bucket, hop in group:
                    assert bucket in packed and bucket not in unpacked
                    received = posted if in_order else arrived
                    assert hop == 0 or (bucket, hop - 1) in received, "forwards what has not come"
                posted.update(group)
            case Wait(group):
                assert posted.issuperset(group)
                arrived.update(group)
            case Unpack(bucket):
                assert {(bucket, hop) for hop in range(hops + 1)} <= arrived, "someone still reads or writes the slot"
                unpacked.add(bucket)


@given(BUCKETS, HOPS, IN_ORDER)
def test_buckets_of_one_hop_are_posted_in_order_on_every_rank(buckets: int, hops: int, in_order: bool) -> None:
    """Both ends of a message count the messages between them, so the order has to be that of the buckets."""
    for hop in range(hops + 1):
        posted = [b for a in actions(buckets, hops, in_order) if isinstance(a, Post) for b, h in a.group if h == hop]
        assert posted == list(range(buckets))


@given(BUCKETS, HOPS, st.lists(st.booleans(), min_size=2, max_size=4), st.data())
def test_ranks_that_wait_for_each_other_all_come_through(
    buckets: int, hops: int, parts: list[bool], data: st.DataObject
) -> None:
    """The worst case: every group needs every rank. Each is let go on in any order, as far as it can."""
    order = actions(buckets, hops, data.draw(IN_ORDER))
    at = [0] * len(parts)
    posted: list[set] = [set() for _ in parts]
    while any(place < len(order) for place in at):
        ready = [
            rank
            for rank, place in enumerate(at)
            if place < len(order)
            and not (isinstance(order[place], Wait) and any(order[place].group not in other for other in posted))
        ]
        assert ready, f"ranks wait for each other at {[order[place] for place in at if place < len(order)]}"
        rank = data.draw(st.sampled_from(ready))
        if isinstance(order[at[rank]], Post):
            posted[rank].add(order[at[rank]].group)
        at[rank] += 1


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("hops", [0, 1, 2])
def test_packing_network_fan_out_and_unpacking_overlap(hops: int, in_order: bool) -> None:
    """In the middle of a refit, while a bucket is packed or unpacked every hop has a bucket under way."""
    order = actions(20, hops, in_order)
    under_way: set[tuple[int, int]] = set()
    seen = Counter()
    for action in order[len(order) // 3 : -len(order) // 3]:
        match action:
            case Post(group):
                under_way.update(group)
            case Wait(group):
                under_way.difference_update(group)
            case Pack() | Unpack():
                if len(seen) or {hop for _, hop in under_way} == set(range(hops + 1)):
                    seen[tuple(sorted(hop for _, hop in under_way))] += 1
    assert seen and all(set(hops_seen) == set(range(hops + 1)) for hops_seen in seen)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("hops", [0, 1, 2, 5])
def test_the_network_has_its_next_bucket_before_the_present_one_is_waited_for(hops: int, in_order: bool) -> None:
    posted: list[int] = []
    for action in actions(20, hops, in_order):
        if isinstance(action, Post):
            posted += [bucket for bucket, hop in action.group if hop == 0]
        if isinstance(action, Wait):
            for bucket in (bucket for bucket, hop in action.group if hop == 0):
                assert max(posted) == min(bucket + 1, 19)


def test_with_one_fan_out_four_buckets_are_under_way_at_once() -> None:
    slots = {Pack: "packed", Unpack: "unpacked"}
    named = [
        (slots[type(a)], a.bucket) if type(a) in slots else (type(a).__name__, a.group)
        for a in actions(9, 1, in_order=True)
    ]
    start = named.index(("Post", ((5, 0), (4, 1))))
    assert named[start : start + 4] == [
        ("Post", ((5, 0), (4, 1))),
        ("Wait", ((4, 0), (3, 1))),
        ("unpacked", 3),
        ("packed", 6),
    ]
