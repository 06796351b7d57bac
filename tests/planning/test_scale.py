"""A trillion-parameter refit is planned in seconds on one core."""

from __future__ import annotations

from refit_transport.bench.planning import LARGE, RANKS, missed, run, table


def test_deepseek_v3_is_planned_and_compiled_within_two_seconds_and_a_gibibyte() -> None:
    found = run("large", 0)
    assert (found.tensors, found.trainers, found.engines) == (45_395, 256, 256)
    assert missed(LARGE[0], found) == []
    assert "2 s" in table([(LARGE[0], found)])


def test_time_grows_no_faster_than_ranks() -> None:
    """Eight times the ranks, at most eight times the processor time (the work that only depends on tensors stays)."""
    small, large = (run("ranks", number) for number in (2, 5))
    assert RANKS[5].training.world == 8 * RANKS[2].training.world == large.trainers
    assert large.cpu_seconds <= 8 * small.cpu_seconds


def test_a_missed_target_is_reported_with_both_figures() -> None:
    from dataclasses import replace

    found = replace(run("tensors", 0), cpu_seconds=3.0, mebibytes=2000.0)
    lines = missed(LARGE[0], found)
    assert len(lines) == 2
    assert "3.00 s of processor time, allowed 2.0 s" in lines[0]
    assert "2000 MiB, allowed 1024 MiB" in lines[1]
