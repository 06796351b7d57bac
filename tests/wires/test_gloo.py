"""Refits over the gloo wire end in the right bytes; a lost peer ends in one error soon, and a new wire works again."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from forked_wires import Rank, Ranks, slowness
from refit_cases import Case, Tensor, bound_rank, columns, contents, everything, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T, join, run_refits

from refit_transport.bench.netlab import Lab, enter_namespace, supported
from refit_transport.planning import compile_program
from refit_transport.wires.base import WireError
from refit_transport.wires.gloo import GlooWire
from refit_transport.wires.lockstep import hops_of

BIG = (2048, 2048)
LARGE = Case((Tensor("w", BIG, rows(BIG, T), columns(BIG, E)),), TWO_DOMAINS, {"bucket_bytes": 1 << 20})


@pytest.mark.parametrize("direct_bytes", [64, 1 << 20], ids=["in place", "packed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_destination_holds_exactly_the_new_version(case: Case, direct_bytes: int) -> None:
    results = run_refits(case, lambda: GlooWire(direct_bytes=direct_bytes))
    assert {rank: found for rank, (found, _) in results.items() if found} == {}
    for link in ("network", "domain", "local"):
        sent, received = (sum(getattr(s, way)[link] for _, s in results.values()) for way in ("sent", "received"))
        assert sent == received


def test_the_cases_reach_every_hop() -> None:
    assert {hops_of(case.plan()) for case in CASES.values()} == {0, 1, 2}


def test_a_second_binding_on_the_same_wire_is_run_as_it_is_cut() -> None:
    first, second = CASES["once per domain: the second hop forwards"], CASES["one hop"]
    plans = first.plan(), second.plan()

    def body(rank: Rank) -> list[str]:
        wire = join(rank, GlooWire())
        found = []
        for version, (case, plan) in enumerate(zip((first, second), plans), start=1):
            trained, served, _, binding = bound_rank(case, plan, rank.rank)
            trained.fill(version)
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            found += served.wrong(version)
            rank.barrier()
        return found

    assert set(map(tuple, run_refits(first, GlooWire, body=body).values())) == {()}


def test_contiguous_pieces_travel_without_staging() -> None:
    shape = (64, 16)
    case = Case((Tensor("w", shape, rows(shape, T), rows(shape, E)),), TWO_DOMAINS, {"bucket_bytes": 4_000})
    plan = case.plan()

    def body(rank: Rank) -> tuple[list[str], int]:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, GlooWire(direct_bytes=64))
        trained.fill(1)
        binding.begin(1)
        wire.run(binding, 1, time.monotonic() + 20)
        rank.barrier()
        return served.wrong(1), binding.peak_extra_bytes

    assert set(map(str, run_refits(case, GlooWire, 1, body).values())) == {"([], 0)"}


def test_tensors_that_moved_and_lie_otherwise_are_refused_instead_of_being_cut_unlike_their_peers() -> None:
    shape = (64, 16)
    case = Case(tuple(Tensor(n, shape, rows(shape, [0]), rows(shape, [1])) for n in "ab"), ((0,), (1,)))
    plan = case.plan()

    def body(rank: Rank) -> str:
        *_, sink, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, GlooWire(direct_bytes=64))
        binding.begin(1)
        wire.run(binding, 1, time.monotonic() + 20)
        rank.barrier()
        if rank.rank == 0:
            return "stays"
        for held in sink._holdings.values():
            held[0] = held[0][0], torch.empty(shape[0], shape[1] * 2)[:, ::2]
        sink.begin = lambda version: True
        binding.begin(2)
        try:
            wire.run(binding, 2, time.monotonic() + 5)
        except WireError as error:
            return str(error)
        return "ran"

    with Ranks(body, case.domains, 1) as ranks:
        ranks.exchange_endpoints()
        ranks.barrier()
        assert "tensors moved since the session was joined" in ranks.results()[1]


def failing(stop: int, last: int = 3):
    """A rank's body: rank ``last`` stops itself with a signal in the middle of a refit, in front of its second bucket;
    the others report (seconds, error, helper threads left after the wire's patience)."""
    plan = LARGE.plan()

    def body(rank: Rank) -> object:
        *_, binding = bound_rank(LARGE, plan, rank.rank)
        wire = join(rank, GlooWire(patience=2.5))
        told = threading.Event()
        threading.Thread(target=lambda: rank.pipe.poll(20) and told.set(), daemon=True).start()
        binding.begin(1)
        if rank.rank == last:
            wire._helper.call = interrupt_at_second_call(wire._helper.call, stop)
            rank.pipe.send(("here", time.monotonic()))
        started = time.monotonic()
        try:
            wire.run(binding, 1, started + 2.0, lambda: "engine rank 3 was lost" if told.is_set() else None)
        except WireError as error:
            took = time.monotonic() - started
            wire.close()
            until = time.monotonic() + 10
            while time.monotonic() < until and any(t.name == "refit-gloo" for t in threading.enumerate()):
                time.sleep(0.02)
            if stop == signal.SIGSTOP:
                rank.barrier()  # rank 0 hosts the store in which the others look
            return took, str(error), error.phase, [t.name for t in threading.enumerate() if t.name == "refit-gloo"]
        return None

    return body


def interrupt_at_second_call(call, stop: int):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), stop)
        return call(*arguments)

    return counted


def test_a_killed_peer_is_one_error_within_two_seconds_and_no_thread_stays() -> None:
    with Ranks(failing(signal.SIGKILL), LARGE.domains, 2) as ranks:
        ranks.exchange_endpoints()
        ranks.expect(3, "here")
        ranks.processes[3].join(10)
        for rank in (0, 1, 2):
            ranks.pipes[rank].send("lost")  # what the control connection tells within milliseconds
        for took, text, phase, left in ranks.results([0, 1, 2]).values():
            assert took < 2.0 * slowness()
            assert "engine rank 3" in text and phase == "exchange"
            assert left == []


def test_a_stopped_peer_is_named_when_the_deadline_passes() -> None:
    with Ranks(failing(signal.SIGSTOP), LARGE.domains, 2) as ranks:
        ranks.exchange_endpoints()
        ranks.expect(3, "here")
        ranks.barrier([0, 1, 2])
        for took, text, phase, left in ranks.results([0, 1, 2]).values():
            assert 1.5 < took < 2.0 + 2.0 * slowness()
            assert "engine rank 3" in text and phase == "exchange"
            assert left == []


FORWARDED = Case(
    tuple(Tensor(f"w{i}", (1024, 1024), rows((1024, 1024), T), everything((1024, 1024), E)) for i in range(4)),
    TWO_DOMAINS,
    {"bucket_bytes": 1 << 20},
)


@pytest.mark.parametrize("victim", [1, 3], ids=["trainer", "engine that forwards"])
def test_after_a_kill_a_new_process_takes_the_place_and_the_next_refit_succeeds(victim: int) -> None:
    plan = FORWARDED.plan()
    assert hops_of(plan) == 1
    for tensor in FORWARDED.tensors:
        contents(FORWARDED, tensor.name, 2)

    def refit(rank: Rank) -> list[str]:
        trained, served, _, binding = bound_rank(FORWARDED, plan, rank.rank)
        trained.fill(2)
        wire = join(rank, GlooWire())
        binding.begin(2)
        wire.run(binding, 2, time.monotonic() + 20)
        rank.barrier()
        return served.wrong(2)

    def body(rank: Rank) -> object:
        *_, binding = bound_rank(FORWARDED, plan, rank.rank)
        wire = join(rank, GlooWire())
        told = threading.Event()
        threading.Thread(target=lambda: rank.pipe.poll(20) and told.set(), daemon=True).start()
        if rank.rank == victim:
            rank.pipe.send(("here", None))
            wire._helper.call = interrupt_at_second_call(wire._helper.call, signal.SIGKILL)
        binding.begin(1)
        started, error = time.monotonic(), None
        try:
            wire.run(binding, 1, started + 20, lambda: f"rank {victim} was lost" if told.is_set() else None)
        except WireError as raised:
            error = raised
        took = time.monotonic() - started
        wire.close()
        rank.pipe.recv()
        return took, error and (str(error), error.phase), refit(rank)

    others = [rank for rank in FORWARDED.ranks if rank != victim]
    with Ranks(body, FORWARDED.domains, 2) as ranks:
        ranks.exchange_endpoints()
        ranks.expect(victim, "here")
        ranks.processes[victim].join(10)
        for rank in others:
            ranks.pipes[rank].send("lost")
        ranks.replace(victim, refit)
        ranks.exchange_endpoints()
        ranks.barrier()
        results = ranks.results()
    assert results.pop(victim) == []
    for took, error, wrong in results.values():
        assert took < 2.0 * slowness() and error == (f"rank {victim} was lost", "exchange") and wrong == []


@pytest.mark.netns
@pytest.mark.parametrize("cut", [0, 1], ids=["the host of the store", "another trainer"])
def test_a_rank_that_is_cut_off_is_named_by_the_others_at_the_deadline(cut: int) -> None:
    if reason := supported():
        pytest.skip(reason)
    shape = (2048, 1024)
    case = Case(
        (Tensor("w", shape, rows(shape, [0, 1]), rows(shape, [2])),), ((0,), (1,), (2,)), {"bucket_bytes": 1 << 20}
    )
    plan = case.plan()

    def body(rank: Rank) -> object:
        *_, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, GlooWire("eth0"))
        binding.bind(wire._staging)
        if rank.rank == 2:
            binding.buckets[2].recvs[0].unpack.then = lambda: rank.pipe.send(("under way", None))
        started = time.monotonic()
        with pytest.raises(WireError) as failure:
            wire.run(binding, 1, started + 4.0)
        took = time.monotonic() - started
        rank.barrier()  # rank 0 hosts the store in which the others look
        return took, failure.value.peer, str(failure.value), failure.value.phase

    with Lab(3, 1e8) as lab:
        namespaces = [lab.namespace(rank) for rank in range(3)]
        with Ranks(body, case.domains, 2, enter=lambda rank: enter_namespace(namespaces[rank])) as ranks:
            ranks.exchange_endpoints()
            ranks.expect(2, "under way")
            lab.link(cut, False)
            ranks.barrier()
            results = ranks.results()
    for rank, (took, peer, text, phase) in results.items():
        assert 4.0 <= took < 4.0 + 3.0 * slowness() and phase == "exchange", results
        assert rank == cut or (peer == cut and f"trainer rank {cut} (pid" in text), results


def test_refits_leave_no_key_in_the_store() -> None:
    case = CASES["one hop"]
    plan = case.plan()

    def body(rank: Rank) -> list[int]:
        *_, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, GlooWire())
        seen = []
        for version in range(1, 6):
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            rank.barrier()
            seen.append(wire._meeting._store.num_keys())
            rank.barrier()
        return seen

    with Ranks(body, case.domains, 2) as ranks:
        ranks.exchange_endpoints()
        for _ in range(10):
            ranks.barrier()
        for seen in ranks.results().values():
            assert len(set(seen)) == 1


def test_fifty_rebuilds_leave_no_thread_and_no_descriptor() -> None:
    case = Case((Tensor("w", WIDE, rows(WIDE, [0]), columns(WIDE, [1])),), ((0,), (1,)))
    plan = case.plan()

    def body(rank: Rank) -> list[tuple[int, ...]]:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        seen = []
        for version in range(1, 51):
            wire = join(rank, GlooWire())
            trained.fill(version % 2)
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            assert not served.wrong(version % 2)
            rank.barrier()
            wire.close()
            del wire
            seen.append(
                (threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
            )
        return seen

    with Ranks(body, case.domains, 1) as ranks:
        for _ in range(50):
            ranks.exchange_endpoints()
            ranks.barrier()
        for seen in ranks.results().values():
            for counts in zip(*seen):
                assert max(counts[25:]) <= max(counts[:10])


def test_programs_of_the_failing_case_have_several_buckets() -> None:
    assert len(compile_program(LARGE.plan(), 3).buckets) > 4
