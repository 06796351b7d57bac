"""The NCCL M2N wire over the real `nccl.m2n`: several ranks, on one GPU if there is one."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from device_ranks import HOST_RMA_NCCL, device, hold, kit, needs, refits, run_on_device
from forked_wires import Rank
from lost_ranks import refit_after_a_failure, run_and_lose, strike
from refit_cases import Case, Tensor, columns, everything, merged, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T, join

from refit_transport.session.totals import expected_of
from refit_transport.wires.base import WireError
from refit_transport.wires.m2n import M2nWire

pytestmark = pytest.mark.gpu

CUBE, LARGE, ODD = (8, 48, 64), (4096, 4096), (1023, 2047)
MIXED = Case(
    (
        *(Tensor(f"rows{i}", WIDE, rows(WIDE, T), columns(WIDE, E), "bfloat16") for i in range(5)),
        *(Tensor(f"experts{i}", CUBE, rows(CUBE, T), columns(CUBE, E), "float8_e4m3fn") for i in range(3)),
        Tensor("to every rank", WIDE, rows(WIDE, T), everything(WIDE, E)),
        Tensor("from replicas", WIDE, everything(WIDE, T), columns(WIDE, E)),
        Tensor("cast", WIDE, rows(WIDE, T), columns(WIDE, E), "float32", "bfloat16"),
        Tensor("uneven", (7, 10), rows((7, 10), T), columns((7, 10), E)),
        Tensor("norm", (7,), everything((7,), T), everything((7,), E), whole=True),
    ),
    TWO_DOMAINS,
    {"bucket_bytes": 1 << 20},
)
REPLICAS = Case(
    tuple(
        Tensor(f"w{i}", LARGE, rows(LARGE, T), merged(columns(LARGE, [2, 3]), columns(LARGE, [4, 5])), "bfloat16")
        for i in range(4)
    ),
    ((0, 1), (2, 3, 4, 5)),
    {"bucket_bytes": 64 << 20},
)
STAGED = Case(
    (
        *(Tensor(f"w{i}", LARGE, rows(LARGE, T), columns(LARGE, E), "bfloat16") for i in range(8)),
        *(Tensor(f"uneven{i}", ODD, rows(ODD, T), columns(ODD, E), "bfloat16") for i in range(8)),
    ),
    TWO_DOMAINS,
    {"bucket_bytes": 64 << 20},
    strided=True,
)


@pytest.fixture(autouse=True)
def library() -> None:
    if not (find_spec("nccl") and find_spec("nccl.m2n")):
        pytest.skip("needs pip install 'refit-transport[m2n]'")
    needs(HOST_RMA_NCCL)


@pytest.mark.parametrize(
    "case",
    [
        CASES["one hop"],
        CASES["casts"],
        CASES["once per domain: the second hop forwards"],
        MIXED,
        Case(MIXED.tensors, TWO_DOMAINS, MIXED.options, strided=True),
        REPLICAS,
    ],
)
def test_every_destination_holds_exactly_the_new_version(case: Case) -> None:
    results = run_on_device(case, refits(case, M2nWire, 3), 3)
    assert {rank: found for rank, (found, _) in results.items() if found} == {}
    nbytes = sum(2 * t.shape[0] * t.shape[1] for t in case.tensors if t.shape == LARGE)
    if nbytes:
        seconds = min(max(seen[version][0] for _, seen in results.values()) for version in (1, 2))
        print(f"\n{nbytes / 1e6:.0f} MB to two replicas in {seconds:.4f} s: {nbytes / seconds / 1e9:.1f} GB/s")


def observed(case: Case, look: Callable[[Rank, M2nWire, object], object]) -> dict[int, object]:
    """Two refits; what ``look`` returns of each rank after them."""
    plan = case.plan()

    def body(rank: Rank) -> object:
        held = hold(case, plan, rank.rank)
        wire = join(rank, M2nWire(), 120.0)
        calls, reshard = [], wire._library.reshard
        wire._library.reshard = lambda *call: (calls.append(call[1]), reshard(*call))
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("refit_transport").addHandler(handler)
        logging.getLogger("refit_transport").setLevel(logging.INFO)
        for version in (1, 2):
            held.trained.fill(version)
            held.binding.begin(version)
            stats = wire.run(held.binding, version, time.monotonic() + 120)
            rank.barrier()
        found = look(wire, held.binding, stats)
        assert not held.served.wrong(2)
        wire.close()
        return found, calls, lines

    return run_on_device(case, body, 2)


def test_members_of_equal_geometry_share_a_call_and_the_choice_is_one_line_of_the_log() -> None:
    results = observed(MIXED, lambda wire, *_: {n: w for n, (w, _) in wire.wires_by_parameter().items()})
    wires, calls, lines = results[0]
    expected = {"uneven": "nccl", "norm": "nccl"}
    assert wires == {t.name: expected.get(t.name, "nccl_m2n") for t in MIXED.tensors}
    assert sorted(calls[: len(calls) // 2]) == [1, 1, 3, 6]  # five and the cast one, which travels in bfloat16
    assert len([line for line in lines if line.startswith("wire nccl_m2n: ")]) == 1
    assert all(result[0] == wires and not result[2] for rank, result in results.items() if rank)


def test_every_byte_of_a_call_is_counted() -> None:
    def counted(wire: M2nWire, binding, stats) -> bool:
        expected = expected_of(binding.program, frozenset())
        return (stats.sent, stats.received) == (expected.sent, expected.received)

    assert all(result[0] for result in observed(MIXED, counted).values())


def test_a_call_that_is_not_made_is_not_counted() -> None:
    def without_the_last(wire: M2nWire, binding, stats) -> tuple[int, int]:
        wire._stacks = wire._stacks[:-1]
        binding.begin(3)
        fewer = wire.run(binding, 3, time.monotonic() + 120)
        return sum(stats.received.values()), sum(fewer.received.values())

    results = observed(CASES["casts"], without_the_last)
    assert all(results[rank][0][0] > results[rank][0][1] for rank in E)


def test_a_plan_with_larger_calls_than_the_library_is_ready_for_is_refused() -> None:
    def larger(wire: M2nWire, *_: object) -> str:
        with pytest.raises(WireError) as failure:
            wire._library.open(64 << 20)
        return str(failure.value)

    assert all("this plan has larger ones" in result[0] for result in observed(MIXED, larger).values())


def test_calls_the_library_and_the_rest_stage_two_buckets_at_most() -> None:
    results = observed(STAGED, lambda wire, binding, _: binding.peak_extra_bytes)
    assert all(0 < result[0] <= 1.05 * 2 * STAGED.options["bucket_bytes"] for result in results.values())


def in_a_call(rank: Rank, wire: M2nWire, sent: int) -> None:
    wire._library.reshard = lambda *_: strike(rank, sent)


def after_the_calls(rank: Rank, wire: M2nWire, sent: int) -> None:
    wire._p2p.exchange = lambda *_: strike(rank, sent)


def fails_if_it_loads(rank: Rank, wire: M2nWire, sink: object) -> None:
    if sink is not None:
        sink.arrived = lambda direct, whole: pytest.fail(f"{direct} were loaded behind a call that waits")


def test_a_rank_lost_in_a_call_ends_in_an_error_that_says_to_restart() -> None:
    for ended in run_and_lose(kit(M2nWire), MIXED, signal.SIGKILL, 30.0, in_a_call, fails_if_it_loads):
        assert ended.phase == "m2n"
        assert "engine rank 3 was lost" in ended.text and "restart this process" in ended.text


def test_a_stopped_peer_is_named_at_the_deadline_and_nothing_is_loaded_behind_its_call() -> None:
    for ended in run_and_lose(kit(M2nWire), MIXED, signal.SIGSTOP, 8.0, in_a_call, fails_if_it_loads):
        assert 8.0 <= ended.seconds < 11.0 and (ended.peer, ended.phase) == (3, "m2n")
        assert "waiting for engine rank 3" in ended.text and "restart this process" in ended.text


def test_a_rank_lost_after_the_calls_needs_no_restart() -> None:
    for ended in run_and_lose(kit(M2nWire), MIXED, signal.SIGKILL, 60.0, after_the_calls):
        assert ended.text == "engine rank 3 was lost"


def test_after_a_failure_in_front_of_the_calls_a_new_wire_refits_again() -> None:
    assert refit_after_a_failure(kit(M2nWire), MIXED) == {()}


def test_what_other_streams_do_meanwhile_changes_nothing() -> None:
    """The memory of calls and of the rest is one: long work on the caller's stream makes a missing event show."""
    plan = MIXED.plan()

    def body(rank: Rank) -> list[str]:
        held = hold(MIXED, plan, rank.rank)
        wire = join(rank, M2nWire(), 120.0)
        wrong = []
        for version in range(1, 6):
            if device().type == "cuda":
                torch.cuda._sleep(20_000_000)
            held.trained.fill(version)
            held.binding.begin(version)
            wire.run(held.binding, version, time.monotonic() + 120)
            wrong += held.served.wrong(version)
        rank.barrier()
        return wrong

    assert set(map(tuple, run_on_device(MIXED, body, 1).values())) == {()}
