"""Bound programs in lock-step: no deadlock, no slot packed before it is free, messages cut alike at both ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_cases import Case, Tensor, bound_rank, everything, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T

from refit_transport.runtime.staging import SLOTS, Staging
from refit_transport.wires.cuts import common_cuts, cut, cut_points
from refit_transport.wires.lockstep import hops_of, run_lockstep

MANY = Case(
    tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), everything(WIDE, E)) for i in range(12)),
    TWO_DOMAINS,
    {"bucket_bytes": 4_000},
)


class Recorder:
    """A backend that moves nothing and remembers what was asked of it."""

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order
        self.events: list[tuple] = []
        self.groups: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def post(self, sends: list, recvs: list) -> int:
        self.groups.append(([(p, t.numel()) for p, t in sends], [(p, t.numel()) for p, t in recvs]))
        self.events.append(("post", len(self.groups) - 1))
        return len(self.groups) - 1

    def wait(self, handle: int) -> None:
        self.events.append(("wait", handle))

    def packing(self, bucket: int) -> AbstractContextManager[None]:
        return nullcontext()

    unpacking = packing

    def drain(self) -> None:
        self.events.append(("drain",))


class Noted:
    """Takes the place of copies."""

    def __init__(self, events: list[tuple], event: tuple) -> None:
        self._events, self._event = events, event

    def run(self) -> None:
        self._events.append(self._event)


def recorded(case: Case, in_order: bool) -> dict[int, Recorder]:
    plan, found = case.plan(), {}
    for rank in case.ranks:
        *_, binding = bound_rank(case, plan, rank)
        binding.begin(1)
        binding.bind(Staging(direct_bytes=None))
        found[rank] = recorder = Recorder(in_order)
        for number, bucket in enumerate(binding.buckets):
            bucket.pack = Noted(recorder.events, ("pack", number))
            if binding.sink is not None:
                binding.sink.arrived = lambda *_: None
            for message in bucket.recvs[:1]:
                message.unpack = Noted(recorder.events, ("unpack", number))

        def parts(number: int, index: int, sending: bool, buckets: tuple = binding.buckets) -> list[torch.Tensor]:
            message = (buckets[number].sends if sending else buckets[number].recvs)[index]
            return [torch.empty(message.nbytes, dtype=torch.uint8)]

        run_lockstep(binding, recorder, parts, hops_of(plan))
    return found


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("case", [*CASES.values(), MANY])
def test_every_rank_comes_through_when_groups_wait_for_their_peers(case: Case, in_order: bool) -> None:
    """A group is through when each of its calls found the call of the same size in a group that its peer has posted;
    in order: in the peer's present group."""
    left = {rank: list(recorder.events) for rank, recorder in recorded(case, in_order).items()}
    groups = {rank: recorder.groups for rank, recorder in recorded(case, in_order).items()}
    posted: dict[int, list[tuple[int, list]]] = {rank: [] for rank in left}
    while any(left.values()):
        moved = False
        for rank, events in left.items():
            while events and not (events[0][0] == "wait" and any(n == events[0][1] for n, _ in posted[rank])):
                kind, *number = events.pop(0)
                moved = True
                if kind == "post":
                    posted[rank].append((number[0], _calls(rank, *groups[rank][number[0]])))
        moved |= _matched(posted, in_order)
        assert moved, f"ranks wait for each other: {posted}"


def _matched(posted: dict[int, list[tuple[int, list]]], in_order: bool) -> bool:
    """Take out what both ends have under way, and groups that are through; False if there was nothing."""
    found = False
    under_way = {rank: groups[:1] if in_order else groups for rank, groups in posted.items()}
    for calls in [calls for groups in under_way.values() for _, calls in groups]:
        for call in list(calls):
            ends = [next((one for _, one in under_way[end] if call in one), None) for end in call[:2]]
            if None not in ends:
                for one in ends:
                    one.remove(call)
                found = True
    for rank, groups in posted.items():
        through = [group for group in groups if not group[1]]
        found |= bool(through)
        posted[rank] = [group for group in groups if group[1]]
    return found


def _calls(rank: int, sends: list, recvs: list) -> list[tuple[int, int, int]]:
    """(from, to, bytes)."""
    return [(rank, peer, n) for peer, n in sends] + [(peer, rank, n) for peer, n in recvs]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("case", [*CASES.values(), MANY])
def test_a_bucket_is_packed_into_a_slot_only_after_its_last_user_is_done(case: Case, in_order: bool) -> None:
    plan = case.plan()
    for recorder in recorded(case, in_order).values():
        order = {event: at for at, event in enumerate(recorder.events)}
        for number in range(SLOTS, len(plan.buckets)):
            at = order["pack", number]
            assert order.get(("unpack", number - SLOTS), -1) < at
        assert recorder.events[-1] == ("drain",)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_both_ends_cut_a_message_alike(mine: list[int], theirs: list[int]) -> None:
    size = min(sum(mine), sum(theirs))
    ends = []
    for lengths in (mine, theirs):
        data, segments = torch.arange(size, dtype=torch.uint8), []
        for length in lengths:
            segments.append(data[:length])
            data = data[length:]
        ends.append([segment for segment in segments if segment.numel()])
    points = common_cuts(*map(cut_points, ends))
    a, b = (cut(segments, points) for segments in ends)
    assert [part.numel() for part in a] == [part.numel() for part in b]
    assert torch.equal(torch.cat(a), torch.cat(b)) and torch.equal(torch.cat(a), torch.arange(size, dtype=torch.uint8))
