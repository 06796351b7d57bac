"""Everything a run reports, in one object: log, progress, and at the end summary and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.table import Table

from refit_transport.report.plots import write_plots
from refit_transport.report.progress import RunProgress
from refit_transport.report.run_log import METRICS, REFITS, RunLog, read_lines
from refit_transport.report.summary import RunSummary, show, summarise


class RefitFigures(Protocol):
    """The part of a refit's report that is shown."""

    @property
    def version(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bytes_by_path(self) -> Mapping[str, int]: ...

    @property
    def phases(self) -> Mapping[str, float]: ...

    @property
    def wire(self) -> str: ...


class RunReport:
    """A context manager around a run; give it to the loop as its reporter, and call ``finish`` when the loop is
    done."""

    def __init__(
        self,
        folder: Path,
        config_yaml: str,
        console: Console | None = None,
        tensorboard: bool = True,
        live: bool | None = None,
    ) -> None:
        """``config_yaml`` is the resolved configuration; ``live`` None shows a bar in terminals only."""
        self._folder = folder
        self._console = console or Console()
        self._log = RunLog(folder, tensorboard)
        (folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
        self._progress = RunProgress(self._console, live)
        self._start = monotonic()

    def __enter__(self) -> Self:
        return self

    def start(self, total_steps: int) -> None:
        """Shows progress from here on."""
        self._progress.start(total_steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._log.close()

    def refit_done(self, report: RefitFigures) -> None:
        self._log.write_refit(
            {
                "version": report.version,
                "seconds": report.seconds,
                "bytes_by_path": dict(report.bytes_by_path),
                "phases": dict(report.phases),
                "wire": report.wire,
            }
        )
        self._progress.refit_done(report.seconds)

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

    def finish(self, weight_version: int, stopped_by: str, plots: bool = True) -> RunSummary:
        """Writes ``summary.json`` and the plots, and shows the final panel."""
        self._progress.stop()
        lines, refits = read_lines(self._folder / METRICS), read_lines(self._folder / REFITS)
        summary = summarise(lines, refits, weight_version, monotonic() - self._start, stopped_by)
        summary.save(self._folder)
        if plots:
            write_plots(self._folder)
        show(summary, self._folder, self._console)
        return summary
