"""What ranks do when one of them is lost in a refit over NCCL: bodies that stand-ins and real GPUs run alike."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from forked_wires import Rank, Ranks
from refit_cases import Case, bound_rank
from small_cases import join

from refit_transport.planning import Plan
from refit_transport.wires.base import Wire, WireError

VICTIM = 3


@dataclass(frozen=True)
class Kit:
    """Where the ranks run: over which wire, and on what tensors (as ``bound_rank`` gives them)."""

    make: Callable[[], Wire]
    hold: Callable[[Case, Plan, int], tuple] = bound_rank
    join_seconds: float = 20.0
    enter: Callable[[int], None] = lambda rank: None


@dataclass(frozen=True)
class Ended:
    """How a rank's refit ended: seconds from its start, and the error."""

    seconds: float
    text: str
    peer: int | None
    phase: str


def strike_at_call(number: int) -> Callable[[Rank, Wire, int], None]:
    """The victim signals itself in front of the call of this number that its wire makes into the group."""

    def install(rank: Rank, wire: Wire, sent: int) -> None:
        call, calls = wire._helper.call, []

        def counted(*arguments):
            calls.append(1)
            if len(calls) == number:
                strike(rank, sent)
            return call(*arguments)

        wire._helper.call = counted

    return install


def strike(rank: Rank, sent: int) -> None:
    rank.pipe.send(("here", None))
    os.kill(os.getpid(), sent)


def run_and_lose(
    kit: Kit,
    case: Case,
    sent: signal.Signals,
    seconds: float,
    install: Callable[[Rank, Wire, int], None],
    prepare: Callable[[Rank, Wire, object], None] = lambda rank, wire, sink: None,
) -> list[Ended]:
    """One refit with a deadline of ``seconds`` in which the victim strikes itself. A kill is told to the others, as the
    control connection does; a stop is not. ``prepare`` changes a survivor."""
    plan = case.plan()

    def body(rank: Rank) -> Ended | None:
        *_, sink, binding = kit.hold(case, plan, rank.rank)
        wire = join(rank, kit.make(), kit.join_seconds)
        told = threading.Event()
        if sent == signal.SIGKILL:
            threading.Thread(target=lambda: rank.pipe.poll(60) and told.set(), daemon=True).start()
        if rank.rank == VICTIM:
            install(rank, wire, sent)
        else:
            prepare(rank, wire, sink)
        binding.begin(1)
        started, ended = time.monotonic(), None
        try:
            wire.run(binding, 1, started + seconds, lambda: "engine rank 3 was lost" if told.is_set() else None)
        except WireError as error:
            ended = Ended(time.monotonic() - started, str(error), error.peer, error.phase)
        if sent == signal.SIGSTOP:
            rank.barrier()  # rank 0 hosts the store in which the others look
        return ended

    others = [rank for rank in case.ranks if rank != VICTIM]
    with Ranks(body, case.domains, 2, enter=kit.enter) as ranks:
        ranks.exchange_endpoints()
        ranks.expect(VICTIM, "here", 60)
        if sent == signal.SIGKILL:
            for rank in others:
                ranks.pipes[rank].send("lost")
        else:
            ranks.barrier(others)
        return list(ranks.results(others, 60).values())


def refit_after_a_failure(kit: Kit, case: Case) -> set[tuple[str, ...]]:
    """All but the victim give up on a first refit; then all refit over new wires. Returns what was wrong."""
    plan = case.plan()

    def body(rank: Rank) -> tuple[str, ...]:
        trained, served, _, binding = kit.hold(case, plan, rank.rank)
        broken = join(rank, kit.make(), kit.join_seconds)
        binding.begin(1)
        text = "rank 3 was lost"
        if rank.rank != VICTIM:
            try:
                broken.run(binding, 1, time.monotonic() + 20, lambda: "rank 3 was lost")
                text = "the refit ran"
            except WireError as error:
                text = str(error)
        broken.close()
        rank.barrier()
        wire = join(rank, kit.make(), kit.join_seconds)
        trained.fill(2)
        binding.begin(2)
        wire.run(binding, 2, time.monotonic() + 60)
        wrong = served.wrong(2)
        rank.barrier()
        return (*wrong, *(() if text == "rank 3 was lost" else (text,)))

    with Ranks(body, case.domains, 2, enter=kit.enter) as ranks:
        ranks.exchange_endpoints()
        ranks.barrier()
        ranks.exchange_endpoints()
        ranks.barrier()
        return set(ranks.results(seconds=120).values())


def abandon_twice(kit: Kit, case: Case) -> list[float]:
    """All but the victim give up on a refit, connect the same wire anew, and give up again. Returns the seconds that
    each took to do so."""
    plan = case.plan()

    def body(rank: Rank) -> list[float]:
        *_, binding = kit.hold(case, plan, rank.rank)
        wire, took = kit.make(), []
        for version in (1, 2):
            join(rank, wire, kit.join_seconds)
            binding.begin(version)
            started = time.monotonic()
            if rank.rank != VICTIM:
                try:
                    wire.run(binding, version, started + 60, lambda: "rank 3 was lost")
                except WireError as error:
                    assert str(error) == "rank 3 was lost", error
                    took.append(time.monotonic() - started)
            rank.barrier()
            wire.close()
        assert rank.rank == VICTIM or len(took) == 2
        return took

    with Ranks(body, case.domains, 2, enter=kit.enter) as ranks:
        for _ in range(2):
            ranks.exchange_endpoints()
            ranks.barrier()
        return [seconds for took in ranks.results(seconds=120).values() for seconds in took]
