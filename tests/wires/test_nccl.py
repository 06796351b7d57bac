"""The NCCL wire over a stand-in for NCCL (see ``nccl_stand_in``): right bytes, NCCL's rules, and its ways to fail.

The same wire over real NCCL is in ``tests/gpu``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from forked_wires import Rank, Ranks, slowness
from lost_ranks import Kit, abandon_twice, refit_after_a_failure, run_and_lose, strike_at_call
from nccl_stand_in import Group, HostQueue, RuleBroken, Work, nccl_wire, note_copies, wait_until
from refit_cases import Case, Tensor, bound_rank, everything, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T, join, run_refits

from refit_transport.wires.base import Peer, WireError
from refit_transport.wires.nccl import NcclWire
from refit_transport.wires.select import make_wire

HOPS = Case(
    tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), everything(WIDE, E)) for i in range(16)),
    TWO_DOMAINS,
    {"bucket_bytes": 4_000},
)


@pytest.mark.parametrize("direct_bytes", [64, 1 << 20], ids=["in place", "packed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_destination_holds_exactly_the_new_version(case: Case, direct_bytes: int) -> None:
    results = run_refits(case, lambda: nccl_wire(direct_bytes=direct_bytes))
    assert {rank: found for rank, (found, _) in results.items() if found} == {}


FORWARDED = "once per domain: the second hop forwards"
RACED = {name: CASES[name] for name in (FORWARDED, "relay and fan-out: three hops", "a trainer that also serves")}
RACED["whole"] = CASES["whole tensors, one over several buckets"]
RACED["many buckets"] = HOPS


def watching_for_races(case: Case, sabotage: Callable[[], None] = lambda: None, seconds: float = 20.0):
    """A rank's body: three refits in which every use of staging is noted with its stream; returns the first race."""
    plan = case.plan()

    def body(rank: Rank) -> str:
        trained, _, sink, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, nccl_wire(direct_bytes=None))
        queue = wire._queue
        note_copies(queue, pytest.MonkeyPatch())
        if sink is not None:
            arrived = sink.arrived

            def read(direct: list, whole: list) -> None:
                for _, tensor in whole:
                    queue.use(tensor, write=False)
                arrived(direct, whole)

            sink.arrived = read
        sabotage()
        try:
            for version in (1, 2, 3):
                trained.fill(version)
                binding.begin(version)
                wire.run(binding, version, time.monotonic() + seconds)
        except (RuleBroken, WireError) as error:
            return str(error)
        finally:
            rank.barrier()  # rank 0 hosts the store
        return ""

    return body


@pytest.mark.parametrize("case", RACED.values(), ids=RACED)
def test_streams_hand_over_each_slot_by_an_event(case: Case) -> None:
    assert set(run_refits(case, nccl_wire, 1, watching_for_races(case)).values()) == {""}


def _no_event() -> None:
    HostQueue.follow = lambda self, mark: None


def _no_wait() -> None:
    Work.wait = lambda self: self.through.wait(20)


def _from_the_callers_stream() -> None:
    on = HostQueue.on
    HostQueue.on = lambda self, stream: (
        nullcontext() if "refit" in threading.current_thread().name else on(self, stream)
    )


@pytest.mark.parametrize("sabotage", [_no_event, _no_wait, _from_the_callers_stream])
def test_a_missing_event_is_found(sabotage: Callable[[], None]) -> None:
    found = run_refits(HOPS, nccl_wire, 1, watching_for_races(HOPS, sabotage, 2.0)).values()
    assert any("no event between" in text for text in found), found


KIT = Kit(nccl_wire)


def no_thread_is_left() -> bool:
    return wait_until(lambda: all(t.name != "refit-nccl" for t in threading.enumerate()), 5)


def test_a_killed_peer_aborts_the_communicator_within_two_seconds() -> None:
    def prepare(rank: Rank, wire: NcclWire, sink: object) -> None:
        group, close = wire._group, wire.close

        def closed(**options: bool) -> None:
            close(**options)
            assert group.aborted.wait(1) and no_thread_is_left()

        wire.close = closed

    for ended in run_and_lose(KIT, HOPS, signal.SIGKILL, 20.0, strike_at_call(4), prepare):
        assert ended.seconds < 2.0 * slowness() and (ended.text, ended.phase) == ("engine rank 3 was lost", "exchange")


def test_a_stopped_peer_ends_in_an_error_at_the_deadline_that_names_it() -> None:
    for ended in run_and_lose(KIT, HOPS, signal.SIGSTOP, 1.0, strike_at_call(4)):
        assert 1.0 <= ended.seconds < 1.0 + 3.0 * slowness()
        assert "engine rank 3" in ended.text and (ended.peer, ended.phase) == (3, "exchange")


def test_an_engine_that_waits_for_bytes_that_never_come_is_freed_by_the_abort() -> None:
    """A loader that synchronises with the device cannot look at the control connection."""
    plan = HOPS.plan()

    def body(rank: Rank) -> object:
        *_, sink, binding = bound_rank(HOPS, plan, rank.rank)
        wire = join(rank, nccl_wire())
        binding.begin(1)
        if rank.rank == 3:
            group = wire._group
            sink.arrived = lambda *_: group.aborted.wait(20)
        started = time.monotonic()
        try:
            wire.run(
                binding, 1, started + 20, lambda: "trainer rank 0 was lost" if time.monotonic() > started + 1 else None
            )
        except WireError as error:
            return time.monotonic() - started, str(error)
        return None

    with Ranks(body, HOPS.domains, 2) as ranks:
        ranks.exchange_endpoints()
        took, text = ranks.results([3])[3]
        assert took < 1.0 + 2.0 * slowness() and text == "trainer rank 0 was lost"


def test_after_a_failure_a_new_wire_refits_again() -> None:
    assert refit_after_a_failure(KIT, HOPS) == {()}


def test_a_rank_that_never_comes_is_an_error_at_the_deadline() -> None:
    wire = nccl_wire()
    endpoint = wire.listen(0)
    peers = [Peer(rank, "trainer", "h", 0, 1, "1", endpoint) for rank in (0, 1)]
    started = time.monotonic()
    with pytest.raises(WireError, match="could not form the communicator of 2 ranks: the deadline passed"):
        wire.connect(0, peers, started + 0.5)
    assert time.monotonic() - started < 3.0


def test_a_wire_that_is_connected_anew_can_be_aborted_again() -> None:
    assert all(seconds < 2.0 * slowness() for seconds in abandon_twice(KIT, HOPS))


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4, dtype=torch.uint8)[:, :2], torch.zeros(4), torch.zeros(0).byte()])
def test_the_stand_in_refuses_what_nccl_would_move_wrongly(tensor: torch.Tensor) -> None:
    group = Group(None, 0, 2, HostQueue.device)
    group._start_coalescing()
    with pytest.raises(RuleBroken):
        group.send([tensor], 1, 0)


def test_a_wire_that_has_no_gpu_says_so_and_what_to_set() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in ("nccl", "nccl_m2n"):
        with pytest.raises(WireError, match=r"no CUDA device.*set `wire` to `tcp`"):
            make_wire(name, {})
    with pytest.raises(ValueError, match="auto, tcp, gloo, nccl, nccl_m2n"):
        make_wire("ib", {})
    assert make_wire("auto", {}).name == "tcp"
    assert NcclWire.name == "nccl"
