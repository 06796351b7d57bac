"""Writes a run's metrics: one JSON line per step, and TensorBoard events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class RunLog:
    """``metrics.jsonl``, ``tensorboard/`` and ``rollouts/`` in a run's folder. Appends to what an earlier part of the
    run wrote, less the steps that are done again."""

    def __init__(self, folder: Path, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self._rollouts = folder / "rollouts"
        self._writer = _tensorboard_writer(folder / "tensorboard") if tensorboard else None
        self._checked_overlap = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: ``step``, ``time`` (Unix seconds) and the metrics; not-finite values are null."""
        if not self._checked_overlap:
            self._drop_from(step)
            self._checked_overlap = True
        line = {"step": step, "time": round(time.time(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def _drop_from(self, step: int) -> None:
        """After a resume, lines of steps that the checkpoint did not contain would appear twice."""
        if not self._path.exists():
            return
        kept = [line for line in read_metrics(self._path) if line["step"] < step]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """``rollouts/step_<n>.jsonl``, one line per sample."""
        self._rollouts.mkdir(exist_ok=True)
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        (self._rollouts / f"step_{step}.jsonl").write_text(text, encoding="utf-8")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` (a file, or the folder it is in). A last line that was cut off is left out."""
    path = path / METRICS if path.is_dir() else path
    lines = path.read_text(encoding="utf-8").split("\n")
    # What stands after the last newline was cut off while it was being written.
    return [json.loads(line) for line in lines[:-1] if line]


def _tensorboard_writer(folder: Path) -> Any:
    # Imported here because TensorBoard takes a second to import and may be switched off.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
