"""A binding stages no more than it must, copies in few calls, and says when tensors are complete."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from refit_transport.layout.region import Region
from refit_transport.runtime.staging import Staging

sys.path.insert(0, str(Path(__file__).parent.parent / "wires"))
from refit_cases import Case, Tensor, bound_rank, columns, contents, everything, rows

SHAPE = (64, 96)
NBYTES = 64 * 96 * 4
TWO = ((0,), (1,))


def deliver(case: Case, trained_and_served, staging: dict[int, Staging], in_place: bool = False) -> None:
    """Play the wire between rank 0 (trainer) and rank 1 (engine)."""
    (_, _, _, sender), (_, _, sink, receiver) = trained_and_served
    sender.bind(staging[0])
    receiver.bind(staging[1])
    for number, (out, into) in enumerate(zip(sender.buckets, receiver.buckets, strict=True)):
        out.pack.run()
        for send, recv in zip(out.sends, into.recvs, strict=True):
            if in_place:
                receiver.attach(number, 0, send.segments)
            else:
                joined = torch.cat(send.segments)
                at = 0
                for segment in recv.segments:
                    segment.copy_(joined[at : at + segment.numel()])
                    at += segment.numel()
            recv.unpack.run()
        sink.arrived(into.direct, into.whole)


def both(case: Case):
    plan = case.plan()
    ranks = [bound_rank(case, plan, rank) for rank in (0, 1)]
    ranks[0][0].fill(1)
    ranks[1][3].begin(1)
    return ranks


def one(tensor: Tensor, **options) -> Case:
    return Case((tensor,), TWO, {"bucket_bytes": 1 << 20, **options})


def test_contiguous_pieces_leave_and_enter_live_tensors_without_staging() -> None:
    case = one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])))
    ranks = both(case)
    direct = Staging(direct_bytes=NBYTES)
    deliver(case, ranks, {0: direct, 1: direct})
    assert ranks[1][1].wrong(1) == []
    assert [rank[3].peak_extra_bytes for rank in ranks] == [0, 0]
    assert [len(b.pack) for b in ranks[0][3].buckets] == [0]


@pytest.mark.parametrize(
    "dtype, engine_dtype, strided, least",
    [
        ("float32", "", False, NBYTES + 1),
        ("float32", "", False, None),
        ("float32", "", True, 64),
        ("float32", "bfloat16", False, 64),
    ],
    ids=["small", "never direct", "strided", "cast by the sender"],
)
def test_all_other_pieces_are_staged(dtype: str, engine_dtype: str, strided: bool, least: int | None) -> None:
    tensor = Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1]), dtype, engine_dtype)
    case = Case((tensor,), TWO, {"bucket_bytes": 1 << 20}, strided)
    ranks = both(case)
    staging = Staging(direct_bytes=least)
    deliver(case, ranks, {0: staging, 1: staging})
    assert ranks[1][1].wrong(1) == []
    assert len(ranks[0][3].buckets[0].pack) == 1
    assert len(ranks[0][3].buckets[0].sends[0].segments) == 1


def test_what_a_peer_reads_in_place_is_staged_by_the_sender_alone() -> None:
    case = one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])))
    ranks = both(case)
    deliver(
        case,
        ranks,
        {0: Staging(direct_bytes=64, read_by=frozenset({1})), 1: Staging(reads=frozenset({0}))},
        in_place=True,
    )
    assert ranks[1][1].wrong(1) == []
    assert ranks[1][3].peak_extra_bytes == 0 < ranks[0][3].peak_extra_bytes


def test_a_table_of_another_plan_is_refused() -> None:
    ranks = both(one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1]))))
    ranks[1][3].bind(Staging(reads=frozenset({0})))
    with pytest.raises(ValueError, match="rank 0 stages 8 bytes for rank 1"):
        ranks[1][3].attach(0, 0, [torch.zeros(8, dtype=torch.uint8)])


def test_equal_data_for_two_peers_is_packed_once() -> None:
    case = Case(
        (Tensor("w", SHAPE, columns(SHAPE, [0, 1]), everything(SHAPE, [2, 3])),),
        ((0,), (1,), (2,), (3,)),
        {"relay": "never"},
        strided=True,
    )
    binding = bound_rank(case, case.plan(), 0)[3]
    binding.bind(Staging())
    (bucket,) = binding.buckets
    assert len(bucket.sends) == 2 and len(bucket.pack) == 1
    assert bucket.sends[0].segments[0].data_ptr() == bucket.sends[1].segments[0].data_ptr()
    assert sorted(len(s.pack) for s in bucket.sends) == [0, 1] and any(s.shares for s in bucket.sends)


def test_staging_is_four_slots_of_half_a_bucket_and_is_kept() -> None:
    case = Case((Tensor("w", SHAPE, columns(SHAPE, [0]), columns(SHAPE, [1])),), TWO, {"bucket_bytes": 8192}, True)
    binding = both(case)[0][3]
    asked = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    staging = Staging(allocate)
    binding.bind(staging)
    assert asked == [4 * 4096] and len(binding.buckets) >= 5
    memory, generation = binding.memory.data_ptr(), binding.generation
    binding.bind(staging)
    assert binding.generation == generation, "nothing moved, so nothing is bound again"
    binding.stale = True
    binding.bind(staging)
    assert binding.generation == generation + 1 and asked == [2 * 8192] and binding.memory.data_ptr() == memory


def test_views_are_taken_again_when_the_source_moved() -> None:
    case = one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])))
    trained, _, _, binding = both(case)[0]
    binding.bind(staging := Staging(direct_bytes=64))
    region, old = trained.held["w"][0]
    moved = old.clone()
    binding.source._holdings["w"][0] = (region, moved)
    binding.source.refresh = lambda: True
    binding.begin(2)
    binding.bind(staging)
    assert binding.buckets[0].sends[0].segments[0].data_ptr() == moved.data_ptr()


def test_whole_tensors_share_memory_over_time_and_arrive_complete() -> None:
    tall = (400, 64)
    case = Case(
        tuple(Tensor(f"w{i}", tall, rows(tall, [0]), everything(tall, [1]), whole=True) for i in range(6)),
        TWO,
        {"bucket_bytes": 50_000},
    )
    ranks = both(case)
    seen = {}
    arrived = ranks[1][2].arrived

    def check(direct, whole) -> None:
        for name, full in whole:
            assert full.is_contiguous() and tuple(full.shape) == tall
            seen[name] = torch.equal(full.view(torch.uint8), contents(case, name, 1).view(torch.uint8))
        arrived(direct, whole)

    ranks[1][2].arrived = check
    deliver(case, ranks, {0: Staging(), 1: Staging(direct_bytes=None)})
    assert seen == {f"w{i}": True for i in range(6)}
    assert ranks[1][1].wrong(1) == []
    model = 6 * 400 * 64 * 4
    assert ranks[1][3].peak_extra_bytes <= 2 * (50_000 + 4096) + model * 2 // 3


def test_direct_names_are_announced_once_after_their_last_bucket() -> None:
    tensors = tuple(Tensor(f"w{i}", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])) for i in range(3))
    binding = both(Case(tensors, TWO, {"bucket_bytes": 10_000}))[1][3]
    binding.bind(Staging())
    names = [name for bucket in binding.buckets for name in bucket.direct]
    assert sorted(names) == ["w0", "w1", "w2"] and not binding.buckets[0].direct


def test_a_tensor_that_is_not_as_planned_is_named() -> None:
    case = one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])))
    trained, _, _, binding = both(case)[0]
    region, tensor = trained.held["w"][0]
    binding.source._holdings["w"][0] = (region, tensor.to(torch.bfloat16))
    with pytest.raises(
        ValueError, match=r"w \[0:64, 0:96\] on rank 0: the plan was made for .*torch.float32.*bfloat16"
    ):
        binding.bind(Staging())


def test_a_rank_without_the_side_it_needs_is_told() -> None:
    case = one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])))
    for rank, text in ((0, "no weight source"), (1, "no weight sink")):
        binding = both(case)[rank][3]
        binding.source = binding.sink = None
        with pytest.raises(ValueError, match=text):
            binding.bind(Staging())


def test_sources_and_sinks_refuse_what_they_do_not_hold() -> None:
    (_, _, _, sender), (_, _, sink, _) = both(one(Tensor("w", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1]))))
    beyond = Region((0, 0), (65, 96))
    for side in (sender.source, sink):
        with pytest.raises(KeyError):
            side.view("other", Region.whole(SHAPE))
        with pytest.raises(ValueError, match=r"not (held|stored) here"):
            side.view("w", beyond)
    with pytest.raises(RuntimeError, match="version 1 is incomplete: w did not arrive"):
        sink.commit(1)
    with pytest.raises(ValueError, match="no trainer holds w"):
        sink.describe([], frozenset())


def test_views_that_exist_only_for_a_while_are_taken_when_they_are_written() -> None:
    tensors = tuple(Tensor(f"w{i}", SHAPE, rows(SHAPE, [0]), rows(SHAPE, [1])) for i in range(6))
    case = Case(tensors, TWO, {"bucket_bytes": NBYTES * 2}, transient=True)
    ranks = both(case)
    sink, receiver = ranks[1][2:]
    direct = Staging(direct_bytes=64)
    receiver.bind(direct)
    assert sink.most_open == 0, "binding takes no view"
    for version in (1, 2):
        deliver(case, ranks, {0: direct, 1: direct})
        assert ranks[1][1].wrong(version) == []
        ranks[0][0].fill(version + 1)
        receiver.begin(version + 1)
    assert sink.most_open == 1 and not sink.open
    assert receiver.generation == 1, "nothing is bound anew"
