"""The NCCL wire over NCCL itself: several ranks, on one GPU if there is one."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from device_ranks import SHARED_GPU_NCCL, enter, hold, needs, refits
from forked_wires import Rank, Ranks
from refit_cases import Case, Tensor, columns, everything, rows
from small_cases import CASES, TWO_DOMAINS, E, T, join

from refit_transport.wires.base import WireError
from refit_transport.wires.nccl import NcclWire

pytestmark = pytest.mark.gpu

LARGE = (4096, 4096)
MODEL = Case(
    tuple(Tensor(f"w{i}", LARGE, rows(LARGE, T), columns(LARGE, E), "bfloat16") for i in range(16)),
    TWO_DOMAINS,
    {"bucket_bytes": 64 << 20},
)
FORWARDED = Case(
    tuple(Tensor(f"w{i}", LARGE, rows(LARGE, T), everything(LARGE, E), "bfloat16") for i in range(8)),
    TWO_DOMAINS,
    {"bucket_bytes": 32 << 20},
)


@pytest.mark.parametrize("case", [*CASES.values(), FORWARDED], ids=[*CASES, "large, forwarded"])
def test_every_destination_holds_exactly_the_new_version(case: Case) -> None:
    needs(SHARED_GPU_NCCL)
    with Ranks(refits(case, NcclWire, 2), case.domains, len(T), enter=enter) as ranks:
        ranks.exchange_endpoints()
        for _ in range(2):
            ranks.barrier()
        results = ranks.results(seconds=120)
    assert {rank: found for rank, (found, _) in results.items() if found} == {}


def test_a_model_of_half_a_gigabyte_and_its_speed(record_property) -> None:
    needs(SHARED_GPU_NCCL)
    with Ranks(refits(MODEL, NcclWire, 4), MODEL.domains, len(T), enter=enter) as ranks:
        ranks.exchange_endpoints()
        for _ in range(4):
            for rank in ranks.pipes:
                ranks.expect(rank, "here", 120)
            for pipe in ranks.pipes.values():
                pipe.send(None)
        results = ranks.results(seconds=120)
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
