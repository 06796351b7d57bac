"""Everything a run reports, in one object: log, progress, and at the end summary and plots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.table import Table

from refit_transport.report.plots import write_plots
from refit_transport.report.progress import RunProgress
from refit_transport.report.run_log import RunLog, read_metrics
from refit_transport.report.summary import RefitRecord, RunSummary, seconds, show, size, summarise

logger = logging.getLogger(__name__)


class RefitLike(Protocol):
    """The part of a refit's report that is shown."""

    version: int
    seconds: float
    bytes_by_path: Mapping[str, int]
    phases: Mapping[str, float]
    wire: str


class RunReport:
    """A context manager around a run; give it to the loop as its reporter, and call ``finish`` when the loop is
    done."""

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        config_yaml: str,
        console: Console | None = None,
        tensorboard: bool = True,
        live: bool | None = None,
        plots: bool = True,
    ) -> None:
        """``config_yaml`` is the resolved configuration; ``live`` None shows a bar in terminals only."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
        self._folder = folder
        self._console = console or Console()
        self._log = RunLog(folder, tensorboard)
        self._progress = RunProgress(total_steps, self._console, live)
        self._plots = plots
        self._refits: list[RefitRecord] = []
        self._start = monotonic()

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        self._log.close()

    def refit_done(self, report: RefitLike) -> None:
        self._refits.append(RefitRecord(report.version, report.seconds, dict(report.bytes_by_path)))
        self._progress.refit_done(report.seconds)
        logger.debug("%s", refit_line(report))

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log.write(step, metrics)
        self._progress.step_done(step, metrics)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._log.write_rollouts(step, rows)

    def validation_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints a table of validation answers."""
        table = Table("prompt", "completion", "answer", "reward", title="validation samples")
        for row in rows:
            table.add_row(*(str(row[name]) for name in ("prompt", "completion", "answer")), f"{row['reward']:.2f}")
        self._console.print(table)

    def finish(self, weight_version: int, stopped_by: str) -> RunSummary:
        """Writes ``summary.json`` and the plots, and shows the final panel."""
        self._progress.__exit__(None, None, None)
        lines = read_metrics(self._folder)
        summary = summarise(lines, self._refits, weight_version, monotonic() - self._start, stopped_by)
        summary.save(self._folder)
        if self._plots:
            write_plots(self._folder)
        show(summary, self._folder, self._console)
        return summary


def refit_line(report: RefitLike) -> str:
    """One line per refit: version, bytes by path, seconds by phase, rate, wire."""
    moved = sum(report.bytes_by_path.values())
    paths = ", ".join(f"{path} {size(count)}" for path, count in report.bytes_by_path.items())
    phases = ", ".join(f"{name} {seconds(value)}" for name, value in report.phases.items())
    rate = moved / report.seconds / 1e9 if report.seconds > 0 else 0.0
    return (
        f"refit version {report.version}: {paths}; {seconds(report.seconds)} ({phases}); {rate:.2f} GB/s; "
        f"wire {report.wire or 'unknown'}"
    )
