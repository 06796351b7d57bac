"""Ranks as processes: calls run on all, failures name the rank, nothing is left behind."""

import os
import time
from pathlib import Path

import pytest

from refit_transport.bench.processes import RankError, Ranks
from refit_transport.bench.quiet import prioritised


class Answers:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def double(self, value: int) -> int:
        return self.rank * value * 2

    def fails_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("no such tensor")

    def dies_on(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(3)

    def hangs_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(30)


def test_a_call_runs_on_every_rank_or_on_those_named():
    with Ranks([3, 5], Answers) as ranks:
        assert ranks.call("double", 2) == {3: 12, 5: 20}
        assert ranks.call("double", 2, only=[5]) == {5: 20}


@pytest.mark.parametrize(
    ("method", "told"), [("fails_on", "no such tensor"), ("dies_on", "died in dies_on"), ("hangs_on", "no answer from")]
)
def test_a_rank_that_fails_dies_or_hangs_is_named_and_all_processes_end(method, told):
    with pytest.raises(RankError, match=told) as failure, Ranks([0, 1], Answers) as ranks:
        pids = [ranks.pid(rank) for rank in ranks.ranks]
        try:
            ranks.call(method, 1, seconds=0.5)
        finally:
            ranks.stop_seconds = 0.2
    assert "1" in str(failure.value)
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)


def test_priority_is_given_back():
    before = os.sched_getscheduler(0)
    with prioritised() as how:
        assert how in ("fifo", "autogroup", "none")
        assert (os.sched_getscheduler(0) == os.SCHED_FIFO) == (how == "fifo")
    assert os.sched_getscheduler(0) == before
