"""Writes a run's metrics and refits as JSON lines, and TensorBoard events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
REFITS = "refits.jsonl"


class RunLog:
    """``metrics.jsonl``, ``refits.jsonl``, ``tensorboard/`` and ``rollouts/`` in a run's folder. Appends to what an
    earlier part of the run wrote, less the steps and versions that are done again after a resume."""

    def __init__(self, folder: Path, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self._refits = folder / REFITS
        self._rollouts = folder / "rollouts"
        self._writer = _tensorboard_writer(folder / "tensorboard") if tensorboard else None
        self._written: set[Path] = set()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: ``step``, ``time`` (Unix seconds) and the metrics; not-finite values are null."""
        line = {"step": step, "time": round(time.time(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append(self._path, "step", line)
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def write_refit(self, refit: Mapping[str, Any]) -> None:
        """One line: ``version``, ``seconds``, ``bytes_by_path``, ``phases`` (seconds), ``wire``."""
        self._append(self._refits, "version", {**refit, "time": round(time.time(), 3)})
        if self._writer is not None:
            self._writer.add_scalar("refit/seconds", refit["seconds"], refit["version"])
            for path, count in refit["bytes_by_path"].items():
                self._writer.add_scalar(f"refit/bytes_{path}", count, refit["version"])

    def _append(self, path: Path, key: str, line: Mapping[str, Any]) -> None:
        if path not in self._written:
            # What an interrupted run did after its last checkpoint would appear twice.
            kept = [earlier for earlier in read_lines(path) if earlier[key] < line[key]]
            path.write_text("".join(json.dumps(earlier) + "\n" for earlier in kept), encoding="utf-8")
            self._written.add(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """``rollouts/step_<n>.jsonl``, one line per sample."""
        self._rollouts.mkdir(exist_ok=True)
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        (self._rollouts / f"step_{step}.jsonl").write_text(text, encoding="utf-8")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; none if there is no file. A last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # What stands after the last newline was cut off while it was being written.
    return [json.loads(line) for line in lines[:-1] if line]


def _tensorboard_writer(folder: Path) -> Any:
    # Imported here because TensorBoard takes a second to import and may be switched off.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
