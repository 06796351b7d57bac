"""The NCCL wire over NCCL itself: several ranks, on one GPU if there is one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from device_ranks import SHARED_GPU_NCCL, device, enter, hold, kit, needs, refits, run_on_device
from forked_wires import Rank, Ranks
from lost_ranks import abandon_twice, refit_after_a_failure, run_and_lose, strike_at_call
from refit_cases import Case, Tensor, columns, everything, rows
from small_cases import CASES, TWO_DOMAINS, E, T, join

from refit_transport.wires.base import Peer, WireError
from refit_transport.wires.nccl import NcclWire, _Groups

pytestmark = pytest.mark.gpu

LARGE = (4096, 4096)
MODEL = Case(
    tuple(Tensor(f"w{i}", LARGE, rows(LARGE, T), columns(LARGE, E), "bfloat16") for i in range(16)),
    TWO_DOMAINS,
    {"bucket_bytes": 64 << 20},
)
MANY = Case(
    tuple(Tensor(f"w{i}", (256, 512), rows((256, 512), T), everything((256, 512), E)) for i in range(16)),
    TWO_DOMAINS,
    {"bucket_bytes": 1 << 20},
)
FORWARDED = Case(
    tuple(Tensor(f"w{i}", LARGE, rows(LARGE, T), everything(LARGE, E), "bfloat16") for i in range(8)),
    TWO_DOMAINS,
    {"bucket_bytes": 32 << 20},
)


@pytest.mark.parametrize("direct_bytes", [64, 1 << 20], ids=["in place", "packed"])
@pytest.mark.parametrize("case", [*CASES.values(), FORWARDED], ids=[*CASES, "large, forwarded"])
def test_every_destination_holds_exactly_the_new_version(case: Case, direct_bytes: int) -> None:
    needs(SHARED_GPU_NCCL)
    results = run_on_device(case, refits(case, partial(NcclWire, direct_bytes=direct_bytes), 2), 2)
    assert {rank: found for rank, (found, _) in results.items() if found} == {}


@pytest.mark.parametrize("slow", ["packing", "unpacking"])
def test_a_slot_passes_from_stream_to_stream_by_events(slow: str) -> None:
    """One of the copying streams is held up at every bucket: a missing event shows in the contents."""
    needs(SHARED_GPU_NCCL)
    plan = MANY.plan()

    def body(rank: Rank) -> list[str]:
        held = hold(MANY, plan, rank.rank)
        wire = join(rank, NcclWire(direct_bytes=None), 120.0)
        copies = getattr(_Groups, slow)

        @contextmanager
        def held_up(groups: _Groups, bucket: int) -> Iterator[None]:
            with copies(groups, bucket):
                if device().type == "cuda":
                    torch.cuda._sleep(2_000_000)
                yield

        setattr(_Groups, slow, held_up)
        wrong = []
        for version in (1, 2, 3):
            held.trained.fill(version)
            held.binding.begin(version)
            wire.run(held.binding, version, time.monotonic() + 60)
            wrong += held.served.wrong(version)
        rank.barrier()
        return wrong

    assert set(map(tuple, run_on_device(MANY, body, 1).values())) == {()}


def test_a_model_of_half_a_gigabyte_and_its_speed(record_property) -> None:
    needs(SHARED_GPU_NCCL)
    results = run_on_device(MODEL, refits(MODEL, NcclWire, 4), 4)
    assert {rank: found for rank, (found, _) in results.items() if found} == {}
    nbytes = sum(LARGE[0] * LARGE[1] * 2 for _ in MODEL.tensors)
    seconds = min(max(seen[version][0] for _, seen in results.values()) for version in (1, 2, 3))
    record_property("gigabytes_per_second", nbytes / seconds / 1e9)
    print(f"\n{nbytes / 1e6:.0f} MB in {seconds:.4f} s: {nbytes / seconds / 1e9:.1f} GB/s; phases of rank 0:")
    print({phase: round(value, 4) for phase, value in results[0][1][-1][1].seconds.items()})


def test_a_killed_rank_is_an_error_within_two_seconds_and_the_next_group_works() -> None:
    needs(SHARED_GPU_NCCL)
    plan = FORWARDED.plan()

    def body(rank: Rank) -> object:
        held = hold(FORWARDED, plan, rank.rank)
        wire = join(rank, NcclWire(), 120.0)
        held.binding.begin(1)
        wire.run(held.binding, 1, time.monotonic() + 60)
        rank.barrier()
        told = threading.Event()
        held.binding.begin(2)
        if rank.rank == 3:
            rank.pipe.send(("here", None))
            held.sink.arrived = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=lambda: rank.pipe.poll(60) and told.set(), daemon=True).start()
        started = time.monotonic()
        try:
            wire.run(held.binding, 2, started + 30, lambda: "engine rank 3 was lost" if told.is_set() else None)
            outcome = None
        except WireError as error:
            outcome = time.monotonic() - started, str(error)
        rank.pipe.recv()
        rank.barrier()
        if rank.rank == 2:
            return outcome, []  # its data came from both trainers: it stays away from the next group
        return outcome, _pair(rank)

    with Ranks(body, FORWARDED.domains, 2, enter=enter) as ranks:
        ranks.exchange_endpoints()
        for rank in ranks.pipes:
            ranks.expect(rank, "here", 120)
        for pipe in ranks.pipes.values():
            pipe.send(None)
        ranks.expect(3, "here")
        ranks.processes[3].join(30)
        lost_at = time.monotonic()
        for rank in (0, 1, 2):
            ranks.pipes[rank].send("lost")
        for rank in (0, 1, 2):
            ranks.expect(rank, "here", 30)
        assert time.monotonic() - lost_at < 4.0
        for rank in (0, 1, 2):
            ranks.pipes[rank].send(None)
        endpoints = ranks.exchange_endpoints([0, 1])
        assert len(endpoints) == 2
        results = ranks.results([0, 1, 2], seconds=120)
    for outcome, wrong in results.values():
        assert wrong == []
        assert outcome is None or "engine rank 3 was lost" in outcome[1]
    assert any(outcome is not None for outcome, _ in results.values())


def test_a_stopped_peer_ends_in_an_error_at_the_deadline_that_names_it() -> None:
    needs(SHARED_GPU_NCCL)
    for ended in run_and_lose(kit(NcclWire), FORWARDED, signal.SIGSTOP, 10.0, strike_at_call(4)):
        assert 10.0 <= ended.seconds < 13.0
        assert "engine rank 3" in ended.text and (ended.peer, ended.phase) == (3, "exchange")


def test_after_a_failure_a_new_wire_refits_again() -> None:
    needs(SHARED_GPU_NCCL)
    assert refit_after_a_failure(kit(NcclWire), FORWARDED) == {()}


def test_an_engine_that_waits_for_bytes_that_never_come_is_freed_by_the_abort() -> None:
    """A loader that synchronises with the device cannot look at the control connection. The first refit connects all
    pairs; in the second the victim's peers find it silent."""
    needs(SHARED_GPU_NCCL)
    plan = FORWARDED.plan()

    def body(rank: Rank) -> object:
        held = hold(FORWARDED, plan, rank.rank)
        wire = join(rank, NcclWire(), 120.0)
        held.binding.begin(1)
        wire.run(held.binding, 1, time.monotonic() + 60)
        rank.barrier()
        if rank.rank == 0:
            rank.barrier()
            return None
        if rank.rank == 3 and device().type == "cuda":
            held.sink.arrived = lambda *_: torch.cuda.synchronize()
        started = time.monotonic()
        failed = lambda: "trainer rank 0 was lost" if time.monotonic() > started + 1 else None  # noqa: E731
        held.binding.begin(2)
        try:
            wire.run(held.binding, 2, started + 60, failed)
        except WireError as error:
            found = time.monotonic() - started, str(error)
        rank.barrier()
        return found

    for outcome in list(run_on_device(FORWARDED, body, 2).values())[1:]:
        assert outcome[0] < 4.0 and outcome[1] == "trainer rank 0 was lost"


def test_a_rank_that_never_comes_is_an_error_at_the_deadline() -> None:
    needs(SHARED_GPU_NCCL)

    def body(rank: Rank) -> tuple[float, str] | None:
        rank.pipe.send(("endpoint", (os.getpid(), {})))
        rank.pipe.recv()
        if rank.rank == 1:
            return None
        wire = NcclWire()
        peers = [Peer(r, "trainer", "h", 0, 1, "1", wire.listen(0) if r == 0 else {}) for r in (0, 1)]
        started = time.monotonic()
        with pytest.raises(WireError) as failure:
            wire.connect(0, peers, started + 5.0)
        return time.monotonic() - started, str(failure.value)

    with Ranks(body, ((0,), (1,)), 1, enter=enter) as ranks:
        ranks.exchange_endpoints()
        seconds, text = ranks.results([0], 60)[0]
    assert seconds < 8.0 and "could not form the communicator of 2 ranks: the deadline passed" in text


def test_a_wire_that_is_connected_anew_can_be_aborted_again() -> None:
    needs(SHARED_GPU_NCCL)
    assert all(seconds < 4.0 for seconds in abandon_twice(kit(NcclWire), FORWARDED))


def _pair(rank: Rank) -> list[str]:
    """A refit between the two ranks that are left, over a new communicator."""
    shape = (64, 64)
    case = Case((Tensor("w", shape, rows(shape, [0]), columns(shape, [1])),), ((0,), (1,)))
    held = hold(case, case.plan(), rank.rank)
    rank.domains = case.domains
    wire = join(rank, NcclWire(), 120.0)
    held.trained.fill(1)
    held.binding.begin(1)
    wire.run(held.binding, 1, time.monotonic() + 60)
    return held.served.wrong(1)
