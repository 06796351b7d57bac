"""Shows a run while it goes: a live bar in a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from refit_transport.report.summary import seconds

PLAIN_PERIOD = 10


class RunProgress:
    """``start``, then ``step_done`` and ``refit_done`` as they happen, then ``stop`` (which may be called twice)."""

    def __init__(self, console: Console, live: bool | None = None) -> None:
        """``live`` None shows a bar where the console is a terminal."""
        self._console = console
        self._live = console.is_terminal if live is None else live
        self._total = 0
        self._start = monotonic()
        self._refit_seconds: float | None = None
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self._live,
        )

    def start(self, total: int) -> None:
        """``total`` is the number of steps the run will have at most."""
        self._total = total
        self._start = monotonic()
        self._task = self._bar.add_task("", total=total, status="starting")
        self._bar.start()

    def stop(self) -> None:
        self._bar.stop()

    def refit_done(self, seconds_taken: float) -> None:
        self._refit_seconds = seconds_taken

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """``step`` counts completed steps; 0 is a validation before the first."""
        status = self._status(metrics)
        self._bar.update(self._task, completed=step, status=status)
        if not self._live and self._worth_a_line(step, metrics):
            elapsed = seconds(monotonic() - self._start)
            self._console.print(
                f"step {step}/{self._total}  {status}  elapsed {elapsed}", highlight=False, soft_wrap=True
            )

    def _worth_a_line(self, step: int, metrics: Mapping[str, float]) -> bool:
        return step <= 1 or step % PLAIN_PERIOD == 0 or step == self._total or "validation/accuracy" in metrics

    def _status(self, metrics: Mapping[str, float]) -> str:
        parts = [f"refit {seconds(self._refit_seconds)}"]
        if "validation/accuracy" in metrics:
            parts.insert(0, f"val accuracy {metrics['validation/accuracy']:.3f}")
        if "train/reward" in metrics:
            parts.insert(0, f"reward {metrics['train/reward']:.3f}")
        if "timing/train/total_step_time" in metrics:
            parts.append(f"step time {seconds(metrics['timing/train/total_step_time'])}")
        return "  ".join(parts)
