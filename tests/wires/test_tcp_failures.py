"""A rank that dies, stops or lies ends the refit everywhere, with one error that names it; the next refit succeeds."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial

import pytest
import torch
from forked_wires import Rank, Ranks, slowness
from refit_cases import GUARD, Case, Tensor, bound_rank, columns, contents, merged, rows

from refit_transport.bench.netlab import Lab, enter_namespace
from refit_transport.wires.base import WireError

SHAPE = (1024, 4096)
"""Large enough that the kernel's buffers cannot take what a lost rank still should get."""
E = [4, 5, 6, 7]
SPLIT, ONE_HOST = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2, 3, 4, 5, 6, 7),)


def case_in(domains: tuple[tuple[int, ...], ...]) -> Case:
    tp2_dp2 = merged(columns(SHAPE, E[:2]), columns(SHAPE, E[2:]))
    tensors = tuple(Tensor(f"w{i}", SHAPE, rows(SHAPE, [0, 1, 2, 3]), tp2_dp2) for i in range(4))
    return Case(tensors, domains, {"bucket_bytes": 1 << 20})


def body_that_fails_once(case: Case, victim: int, sent: signal.Signals):
    """One good refit; then ``victim`` signals itself in the middle of the next; the others report their error, and
    all but the victim's old process refit anew."""
    plan = case.plan()

    def body(rank: Rank) -> object:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        trained.fill(1)
        wire = rank.join()
        binding.begin(1)
        wire.run(binding, 1, time.monotonic() + 20)
        rank.barrier()
        if rank.rank == victim:
            strike_in_bucket(rank, binding, 3, sent)
        error = None
        try:
            wire.run(binding, 2, time.monotonic() + 20)
        except WireError as raised:
            error = raised
        rank.pipe.send(("error", (error and (str(error), error.peer, error.phase), time.monotonic())))
        wire.close()
        rank.pipe.recv()
        trained.fill(3)
        wire = rank.join()
        wire.run(binding, 3, time.monotonic() + 20)
        return served.wrong(3)

    return body


def strike_in_bucket(rank: Rank, binding, number: int, sent: signal.Signals) -> None:
    """Make this process signal itself when it packs or stores a message of a bucket, and say when."""
    bucket = binding.buckets[number]

    class Strike:
        def run(self) -> None:
            rank.pipe.send(("struck", time.monotonic()))
            os.kill(os.getpid(), sent)

    for message in bucket.sends:
        message.pack = Strike()
    for message in bucket.recvs:
        message.unpack = Strike()


@pytest.mark.parametrize("domains", [SPLIT, ONE_HOST], ids=["two domains", "one host"])
@pytest.mark.parametrize("victim", [1, 6], ids=["trainer", "engine"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_every_other_rank_names_the_lost_peer_in_time_and_the_next_refit_succeeds(
    domains: tuple, victim: int, sent: signal.Signals
) -> None:
    slow = slowness()
    stall_s, limit = (10.0, 2.0 * slow) if sent == signal.SIGKILL else (slow, 3.0 * slow)
    case = case_in(domains)
    for tensor in case.tensors:
        contents(case, tensor.name, 1), contents(case, tensor.name, 3)
    options = {"stall_s": stall_s, "bytes_per_s": 1e9, "direct_bytes": None}
    body = body_that_fails_once(case, victim, sent)
    others = [rank for rank in case.ranks if rank != victim]
    with Ranks(body, domains, 4, options) as ranks:
        ranks.exchange_endpoints()
        ranks.barrier()
        struck = ranks.expect(victim, "struck")
        errors = {rank: ranks.expect(rank, "error") for rank in others}
        if sent == signal.SIGSTOP:
            os.kill(ranks.processes[victim].pid, signal.SIGKILL)
        ranks.replace(victim, _newcomer(case))
        for rank in others:
            ranks.pipes[rank].send(None)
        ranks.exchange_endpoints()
        assert {rank: wrong for rank, wrong in ranks.results().items() if wrong} == {}
    pid = ranks.first_pids[victim]
    for rank, (error, ended) in errors.items():
        assert error is not None, f"rank {rank} finished although rank {victim} was lost"
        text, peer, phase = error
        assert peer == victim and f"rank {victim} (pid {pid} on" in text and phase in ("network", "domain"), (
            rank,
            error,
        )
        assert ended - struck < limit, (rank, ended - struck, limit, text)


@pytest.mark.netns
def test_a_rank_that_is_cut_off_is_named_by_the_others_by_the_stall_deadline() -> None:
    shape = (2048, 1024)
    case = Case(
        (Tensor("w", shape, rows(shape, [0, 1]), rows(shape, [2])),), ((0,), (1,), (2,)), {"bucket_bytes": 1 << 20}
    )
    plan = case.plan()

    def body(rank: Rank) -> object:
        binding = bound_rank(case, plan, rank.rank)[3]
        wire = rank.join()
        binding.bind(wire._staging)
        if rank.rank == 2:
            binding.buckets[2].recvs[0].unpack = Tell(rank)
        text = outcome(lambda: wire.run(binding, 1, time.monotonic() + 20))
        return text, time.monotonic()

    class Tell:
        def __init__(self, rank: Rank) -> None:
            self.rank = rank

        def run(self) -> None:
            self.rank.pipe.send(("under way", None))

    slow = slowness()
    options = {"network_interface": "eth0", "stall_s": slow, "bytes_per_s": 1e9, "direct_bytes": None}
    with Lab(3, 1e8) as lab:
        enter = partial(_enter, [lab.namespace(rank) for rank in range(3)])
        with Ranks(body, case.domains, 2, options, enter) as ranks:
            ranks.exchange_endpoints()
            ranks.expect(2, "under way")
            lab.link(0, False)
            cut_off = time.monotonic()
            results = ranks.results()
    for rank in (1, 2):
        text, ended = results[rank]
        assert "trainer rank 0 (pid" in text and "did not answer" in text, results
        assert ended - cut_off < 4 * slow
    assert "did not answer" in results[0][0]


def _enter(namespaces: list[str], rank: int) -> None:
    enter_namespace(namespaces[rank])


def _newcomer(case: Case):
    plan = case.plan()

    def body(rank: Rank) -> object:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        trained.fill(3)
        rank.join().run(binding, 3, time.monotonic() + 20)
        return served.wrong(3)

    return body


def test_fifty_rebuilds_leave_no_descriptor_thread_or_shared_memory() -> None:
    case = Case(
        tuple(Tensor(f"w{i}", (64, 64), rows((64, 64), [0, 1]), columns((64, 64), [2, 3])) for i in range(4)),
        ((0, 1), (2, 3)),
    )
    plan = case.plan()

    def body(rank: Rank) -> object:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        trained.fill(1)
        seen = []
        for _ in range(51):
            wire = rank.join()
            wire.run(binding, 1, time.monotonic() + 20)
            rank.barrier()
            wire.close()
            seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), _mapped_blocks()))
        return seen, served.wrong(1)

    with Ranks(body, case.domains, 2) as ranks:
        for _ in range(51):
            ranks.exchange_endpoints()
            ranks.barrier()
        for seen, wrong in ranks.results().values():
            assert seen[0] == seen[50]
            assert not wrong
    assert not [name for name in os.listdir("/dev/shm") if "refit" in name]


def _mapped_blocks() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:refit" in line for line in maps)


def pair(options: dict, body):
    case = Case(
        (Tensor("w", (512, 512), rows((512, 512), [0]), rows((512, 512), [1])),),
        ((0,), (1,)),
        {"bucket_bytes": 1 << 20},
    )
    plan = case.plan()
    return Ranks(lambda rank: body(rank, case, plan), case.domains, 1, options)


def outcome(run) -> str:
    try:
        run()
    except WireError as error:
        return str(error)
    return "finished"


def test_a_failure_told_by_the_control_connection_ends_the_run() -> None:
    def body(rank: Rank, case: Case, plan) -> str:
        binding = bound_rank(case, plan, rank.rank)[3]
        wire = rank.join()
        if rank.rank == 1:
            return outcome(lambda: wire.run(binding, 1, time.monotonic() + 20, lambda: "engine rank 9 died"))
        rank.barrier()
        return "did not take part"

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        assert "engine rank 9 died" in ranks.expect(1, "result", 5)


def test_close_from_another_thread_ends_the_run() -> None:
    def body(rank: Rank, case: Case, plan) -> str:
        binding = bound_rank(case, plan, rank.rank)[3]
        wire = rank.join()
        if rank.rank == 0:
            rank.barrier()
            return ""
        threading.Timer(0.2, wire.close).start()
        started = time.monotonic()
        text = outcome(lambda: wire.run(binding, 1, time.monotonic() + 20))
        assert time.monotonic() - started < 2
        return text

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        assert "was closed" in ranks.expect(1, "result", 5)


def test_the_overall_deadline_names_the_peer_that_never_began() -> None:
    def body(rank: Rank, case: Case, plan) -> str:
        binding = bound_rank(case, plan, rank.rank)[3]
        wire = rank.join()
        if rank.rank == 0:
            rank.barrier()
            return ""
        return outcome(lambda: wire.run(binding, 1, time.monotonic() + 0.5))

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        text = ranks.expect(1, "result", 5)
    assert "deadline" in text and "trainer rank 0 (pid" in text


@pytest.mark.parametrize("what", ["version", "plan"])
def test_ranks_that_disagree_on_version_or_plan_are_stopped_before_the_first_byte(what: str) -> None:
    def body(rank: Rank, case: Case, plan) -> tuple[str, bool]:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        trained.fill(1)
        if what == "plan":
            object.__setattr__(binding.program, "digest", f"digest of rank {rank.rank}")
        wire = rank.join()
        version = 1 + rank.rank if what == "version" else 1
        text = outcome(lambda: wire.run(binding, version, time.monotonic() + 20))
        return text, all(bool((t.view(torch.uint8) == GUARD).all()) for held in served.held.values() for _, t in held)

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        text, untouched = ranks.expect(1, "result", 5)
    assert ("refits version 1 while this rank refits version 2" if what == "version" else "runs another plan") in text
    assert untouched


def test_an_engine_that_fails_to_load_is_named_with_its_error() -> None:
    def body(rank: Rank, case: Case, plan) -> str:
        binding = bound_rank(case, plan, rank.rank)[3]
        wire = rank.join()
        if rank.rank == 1:
            binding.sink.arrived = lambda direct, whole: (_ for _ in ()).throw(ValueError("w does not fit"))
            with pytest.raises(ValueError):
                wire.run(binding, 1, time.monotonic() + 20)
            rank.barrier()
            return ""
        return outcome(lambda: [wire.run(binding, v, time.monotonic() + 20) for v in (1, 2)])

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        assert "rank 1 failed: ValueError: w does not fit" in ranks.expect(0, "result", 5)


def test_strangers_neither_join_nor_disturb() -> None:
    def body(rank: Rank, case: Case, plan) -> list[str]:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        trained.fill(1)
        wire = rank.join(before_connect=pester)
        pester(rank.own_endpoint)
        wire.run(binding, 1, time.monotonic() + 20)
        return served.wrong(1)

    strangers = []

    def pester(endpoint: dict) -> None:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"refit\0\0\1" + b"\xff" * 60):
            sock = socket.create_connection(tuple(endpoint["network"]))
            sock.sendall(said)
            strangers.append(sock)

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        assert ranks.results() == {0: [], 1: []}


def test_another_incarnation_is_refused_by_name() -> None:
    def body(rank: Rank, case: Case, plan) -> str:
        return outcome(lambda: rank.join(1.0, alter=stale if rank.rank == 0 else None))

    def stale(endpoints: dict) -> None:
        endpoints[1][1]["token"] = "00" * 16

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        results = ranks.results()
    assert "engine rank 1 (pid" in results[0] and "another incarnation" in results[0]
    assert "no connection with trainer rank 0 (pid" in results[1]


def test_a_peer_that_is_gone_fails_the_connect_at_once() -> None:
    def body(rank: Rank, case: Case, plan) -> str:
        if rank.rank == 1:
            rank.listen_and_leave()
            return ""
        return outcome(lambda: rank.join(10.0))

    ranks = pair({}, body)
    with ranks:
        ranks.exchange_endpoints()
        assert "cannot reach engine rank 1 (pid" in ranks.expect(0, "result", 5)
