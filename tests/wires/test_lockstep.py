"""The order of groups: the same on every rank, free of deadlock, with packing and unpacking beside the exchange."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_cases import Case, Tensor, bound_rank, everything, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T

from refit_transport.runtime.staging import SLOTS, Staging
from refit_transport.wires.cuts import common_cuts, cut, cut_points
from refit_transport.wires.lockstep import groups_of, hops_of, run_lockstep

MANY = Case(
    tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), everything(WIDE, E)) for i in range(12)),
    TWO_DOMAINS,
    {"bucket_bytes": 4_000},
)


class Recorder:
    """A backend that moves nothing and remembers what was asked of it."""

    def __init__(self) -> None:
        self.events: list[tuple] = []
        self.groups: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def post(self, sends: list, recvs: list) -> int:
        self.groups.append(([(p, t.numel()) for p, t in sends], [(p, t.numel()) for p, t in recvs]))
        self.events.append(("post", len(self.groups) - 1))
        return len(self.groups) - 1

    def wait(self, handle: int) -> None:
        self.events.append(("wait", handle))

    def drain(self) -> None:
        self.events.append(("drain",))


class Noted:
    """Takes the place of copies."""

    def __init__(self, events: list[tuple], event: tuple) -> None:
        self._events, self._event = events, event

    def run(self) -> None:
        self._events.append(self._event)


def recorded(case: Case) -> dict[int, Recorder]:
    plan, found = case.plan(), {}
    for rank in case.ranks:
        *_, binding = bound_rank(case, plan, rank)
        binding.begin(1)
        binding.bind(Staging(direct_bytes=None))
        found[rank] = recorder = Recorder()
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


@pytest.mark.parametrize("case", [*CASES.values(), MANY])
def test_every_rank_comes_through_when_groups_wait_for_their_peers(case: Case) -> None:
    """A group is through when each of its calls found the call of the same size in the peer's present group."""
    left = {rank: [_calls(rank, *group) for group in recorder.groups] for rank, recorder in recorded(case).items()}
    while any(left.values()):
        present = {rank: groups[0] for rank, groups in left.items() if groups}
        matched = False
        for rank, calls in present.items():
            for call in list(calls):
                other = present.get(call[1] if call[0] == rank else call[0], [])
                if call in calls and call in other:
                    calls.remove(call)
                    other.remove(call)
                    matched = True
        through = [rank for rank, calls in present.items() if not calls]
        assert matched or through, f"ranks wait for each other: {present}"
        for rank in through:
            left[rank].pop(0)


def _calls(rank: int, sends: list, recvs: list) -> list[tuple[int, int, int]]:
    """(from, to, bytes)."""
    return [(rank, peer, n) for peer, n in sends] + [(peer, rank, n) for peer, n in recvs]


@pytest.mark.parametrize("case", [*CASES.values(), MANY])
def test_a_bucket_is_packed_into_a_slot_only_after_its_last_user_is_done(case: Case) -> None:
    plan = case.plan()
    for recorder in recorded(case).values():
        order = {event: at for at, event in enumerate(recorder.events)}
        for number in range(SLOTS, len(plan.buckets)):
            at = order["pack", number]
            assert order.get(("unpack", number - SLOTS), -1) < at


def test_without_forwarding_packing_and_unpacking_lie_between_post_and_wait() -> None:
    case = CASES["one hop"]
    assert hops_of(case.plan()) == 0
    events = recorded(case)[2].events
    assert events[:3] == [("pack", 0), ("post", 0), ("pack", 1)]
    assert [e for e in events if e[1:] in ((1,), (0,))][-4:] == [("post", 1), ("unpack", 0), ("wait", 1), ("unpack", 1)]
    assert events[-1] == ("drain",)


@given(buckets=st.integers(0, 6), hops=st.integers(0, 4))
def test_every_hop_of_every_bucket_is_in_one_group_in_order(buckets: int, hops: int) -> None:
    groups = [group for step in range(buckets + min(hops, 1)) for group in groups_of(step, buckets, hops)]
    when = {item: at for at, group in enumerate(groups) for item in group}
    assert sorted(when) == [(bucket, hop) for bucket in range(buckets) for hop in range(hops + 1)]
    assert len(when) == sum(map(len, groups))
    for (bucket, hop), at in when.items():
        assert hop == 0 or when[bucket, hop - 1] < at
        assert bucket == 0 or when[bucket - 1, hop] < at


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
