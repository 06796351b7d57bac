"""A run's files, summary, plots and progress."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from refit_transport.report.plots import longest_phases, moving_mean, write_plots
from refit_transport.report.progress import RunProgress
from refit_transport.report.run_log import RunLog, read_lines
from refit_transport.report.run_report import RunReport
from refit_transport.report.summary import seconds, size, summarise


def refit(version: int, took: float = 0.02) -> SimpleNamespace:
    moved = {"reshard": 3_000_000, "broadcast": 1_000_000}
    return SimpleNamespace(
        version=version, seconds=took, bytes_by_path=moved, phases={"pause": 0.001, "exchange": 0.015}, wire="tcp"
    )


def fill(folder: Path, steps: int, console: Console, live: bool = False) -> RunReport:
    """A report of ``steps`` steps whose reward rises from 0.01 by 0.01 a step."""
    with RunReport(folder, "grpo: {seed: 1}\n", console, live=live) as report:
        report.start(steps)
        for step in range(1, steps + 1):
            report.refit_done(refit(step, 1.5 if step == 1 else 0.02))
            metrics = {
                "train/reward": step / 100,
                "train/token_mult_prob_error": 1.0 + step / 1e4,
                "timing/train/total_step_time": 0.5,
            }
            report.step_done(step, metrics | ({"validation/accuracy": 0.9} if step == 15 else {}))
            report.rollouts(step, [{"prompt": "1=", "reward": 1.0}])
        report.finish(weight_version=steps + 1, stopped_by="max_num_steps")
    return report


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder, output = tmp_path_factory.mktemp("run"), StringIO()
    fill(folder, 30, Console(file=output, width=100))
    return folder, output.getvalue()


def test_the_summary_has_the_promised_numbers(finished: tuple[Path, str]) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary.pop("seconds_total") > 0
    assert summary == {
        "steps": 30,
        "reward_first": pytest.approx(0.03),
        "reward_last": pytest.approx(0.28),
        "refits": 30,
        "refit_seconds_median": 0.02,
        "bytes_reshard": 90_000_000,
        "bytes_broadcast": 30_000_000,
        "weight_version": 31,
        "token_mult_prob_error_max": pytest.approx(1.003),
        "validation_accuracy": 0.9,
        "stopped_by": "max_num_steps",
    }


def test_output_that_is_no_terminal_has_one_line_per_ten_steps(finished: tuple[Path, str]) -> None:
    lines = [line for line in finished[1].splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/30", "10/30", "15/30", "20/30", "30/30"]
    assert "reward 0.100  refit 20.0 ms  step time 500.0 ms" in lines[1]
    assert "\x1b" not in finished[1]


def test_the_panel_says_what_happened_and_where_to_look(finished: tuple[Path, str]) -> None:
    folder, output = finished
    text = " ".join(output.replace("│", " ").split())
    for words in (
        "reward 0.030 -> 0.280 over 30 steps",
        "refits 30, median 20.0 ms",
        "reshard 90.0 MB, broadcast 30.0 MB",
        "at most 1.0030",
    ):
        assert words in text
    assert all(str(folder / name) in text.replace(" ", "") for name in ("metrics.jsonl", "plots"))


def test_the_folder_holds_metrics_refits_rollouts_and_configuration(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == list(range(1, 31))
    assert read_lines(folder / "refits.jsonl")[4]["phases"] == {"pause": 0.001, "exchange": 0.015}
    assert read_lines(folder / "rollouts" / "step_7.jsonl") == [{"prompt": "1=", "reward": 1.0}]
    assert (folder / "config.yaml").read_text() == "grpo: {seed: 1}\n"
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert len(events.Scalars("train/reward")) == 30
    assert [event.step for event in events.Scalars("refit/bytes_reshard")] == list(range(1, 31))


def test_the_plots_are_images_of_some_size(finished: tuple[Path, str]) -> None:
    for name in ("reward", "refit_time", "token_mult_prob_error"):
        content = (finished[0] / "plots" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


def test_a_run_without_metrics_has_no_plots(tmp_path: Path) -> None:
    assert write_plots(tmp_path) == []


def test_a_terminal_shows_step_reward_and_refit_time() -> None:
    output = StringIO()
    progress = RunProgress(Console(file=output, force_terminal=True, width=120))
    progress.start(8)
    progress.refit_done(0.0421)
    progress.step_done(3, {"train/reward": 0.25})
    progress.stop()
    progress.stop()
    shown = output.getvalue()
    assert "3/8" in shown
    assert "reward 0.250  refit 42.1 ms" in shown
    assert "elapsed" not in shown


def test_steps_done_again_after_a_resume_appear_once(tmp_path: Path) -> None:
    for steps in (range(1, 6), range(4, 8)):
        log = RunLog(tmp_path, tensorboard=False)
        for step in steps:
            log.write(step, {"first": float(steps.start)})
            log.write_refit({"version": step, "seconds": float(steps.start)})
        log.close()
    assert [(line["step"], line["first"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [
        *((step, 1) for step in (1, 2, 3)),
        *((step, 4) for step in (4, 5, 6, 7)),
    ]
    assert [line["version"] for line in read_lines(tmp_path / "refits.jsonl")] == list(range(1, 8))


def test_values_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=False)
    log.write(1, {"train/loss": math.nan, "train/probs_ratio_min": math.inf, "train/reward": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["train/loss"] is None


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "tra')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    RunLog(tmp_path, tensorboard=False).write(2, {})
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_run_that_never_stepped_has_a_summary() -> None:
    summary = summarise([], [], weight_version=1, seconds_total=1.0, stopped_by="max_num_steps")
    assert (summary.reward_first, summary.refits, summary.refit_seconds_median) == (None, 0, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.00123, "1.2 ms"), (1.239, "1.24 s"), (125.2, "2 min 05 s"), (179.9, "3 min 00 s")],
)
def test_seconds_in_words(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (3.2e6, "3.2 MB"), (5.6e12, "5.60 TB")])
def test_sizes_in_words(count: float, text: str) -> None:
    assert size(count) == text


def test_moving_mean_uses_what_there_is() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 3) == [1, 2, 3, 5]


def test_the_longest_phases_come_first() -> None:
    refits = [{"phases": {"a": 1.0, "b": 3.0}}, {"phases": {"c": 2.5, "d": 0.1, "e": 0.2}}]
    assert longest_phases(refits) == ["b", "c", "a", "e"]
    assert longest_phases([{"phases": {"copy": 1.0}}]) == []
