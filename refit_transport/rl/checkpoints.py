"""Where checkpoints lie, which to keep, and when to write one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from refit_transport.rl.settings import CheckpointSettings

INFO = "training_info.json"


@dataclass(frozen=True)
class SavedStep:
    step: int
    path: Path
    metric: float | None


def saved_steps(directory: Path) -> list[SavedStep]:
    """Complete checkpoints in ``directory``, oldest first."""
    found = []
    for info in directory.glob(f"step_*/{INFO}"):
        content = json.loads(info.read_text())
        found.append(SavedStep(content["step"], info.parent, content["metric"]))
    return sorted(found, key=lambda saved: saved.step)


class CheckpointStore:
    """Folders ``step_<n>`` below one directory. A folder appears under its name only when it is complete."""

    def __init__(self, directory: Path, settings: CheckpointSettings) -> None:
        self._directory = directory
        self._settings = settings

    def save(self, step: int, metrics: Mapping[str, float], write: Callable[[Path], None]) -> Path:
        """Calls ``write(folder)``, then publishes the folder and drops what ``keep_top_k`` does not keep."""
        building = self._directory / f"tmp_step_{step}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        write(building)
        info = {"step": step, "metric_name": self._settings.metric_name, "metric": self._metric(metrics)}
        (building / INFO).write_text(json.dumps(info))
        path = self._directory / f"step_{step}"
        shutil.rmtree(path, ignore_errors=True)
        building.rename(path)
        self._prune()
        return path

    def _metric(self, metrics: Mapping[str, float]) -> float | None:
        """``val:accuracy`` names ``validation/accuracy``, ``train:reward`` names ``train/reward``."""
        prefix, _, name = (self._settings.metric_name or "").partition(":")
        return metrics.get(f"{'validation' if prefix == 'val' else prefix}/{name}")

    def saved(self) -> list[SavedStep]:
        return saved_steps(self._directory)

    def to_resume(self) -> Path | None:
        """The newest checkpoint of this run, else the one that ``resume_from`` names, else None. Raises ValueError when
        ``resume_from`` holds none."""
        if saved := self.saved():
            return saved[-1].path
        if self._settings.resume_from is None:
            return None
        named = Path(self._settings.resume_from)
        if (named / INFO).is_file():
            return named
        if found := saved_steps(named):
            return found[-1].path
        raise ValueError(f"checkpointing.resume_from: got {named}, which is no checkpoint and has none in it")

    def _prune(self) -> None:
        """Keeps the best ``keep_top_k`` (later ones win ties, those without a metric come last) and the newest, which a
        resume needs."""
        if self._settings.keep_top_k is None:
            return
        saved = self.saved()
        ranked = sorted(saved, key=self._rank, reverse=True)
        keep = {entry.step for entry in ranked[: self._settings.keep_top_k]} | {saved[-1].step}
        for entry in saved:
            if entry.step not in keep:
                shutil.rmtree(entry.path)

    def _rank(self, saved: SavedStep) -> tuple[bool, float, int]:
        if saved.metric is None:
            return False, 0.0, saved.step
        return True, saved.metric if self._settings.higher_is_better else -saved.metric, saved.step


class SaveDeadline:
    """``checkpoint_must_save_by``: says once when the next step might end after the deadline."""

    def __init__(self, must_save_by: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = None if must_save_by is None else parse_duration(must_save_by)
        self._clock = clock
        self._start = self._last = clock()
        self._longest_step = 0.0

    def due(self) -> bool:
        """Call once per step. True when another step as long as the longest so far would pass the deadline."""
        now = self._clock()
        self._longest_step, self._last = max(self._longest_step, now - self._last), now
        if self._limit is None or now - self._start + self._longest_step < self._limit:
            return False
        self._limit = None
        return True


def parse_duration(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS`` (leading parts may be left out). Raises ValueError for anything else."""
    parts = text.split(":")
    if len(parts) > 4 or not all(part.isdigit() for part in parts):
        raise ValueError(f"checkpointing.checkpoint_must_save_by: got {text!r}, allowed null or 'DD:HH:MM:SS'")
    weights = (86400, 3600, 60, 1)[-len(parts) :]
    return float(sum(int(part) * weight for part, weight in zip(parts, weights, strict=True)))
