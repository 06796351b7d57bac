"""What a run came to: ``summary.json`` and the panel shown at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

EDGE = 5
"""Steps at each end of a run over which its reward is averaged."""


@dataclass(frozen=True)
class RunSummary:
    """The content of ``summary.json``. Times are seconds, bytes are totals over all refits. A resumed run
    counts its earlier part too, except in ``seconds_total``."""

    steps: int
    reward_first: float | None
    reward_last: float | None
    refits: int
    refit_seconds_median: float | None
    bytes_reshard: int
    bytes_broadcast: int
    weight_version: int
    token_mult_prob_error_max: float | None
    validation_accuracy: float | None
    seconds_total: float
    stopped_by: str

    def save(self, folder: Path) -> Path:
        path = folder / "summary.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return path


def summarise(
    lines: Sequence[Mapping[str, Any]],
    refits: Sequence[Mapping[str, Any]],
    weight_version: int,
    seconds_total: float,
    stopped_by: str,
) -> RunSummary:
    """From the lines of ``metrics.jsonl`` and ``refits.jsonl``."""
    rewards = _series(lines, "train/reward")
    errors = _series(lines, "train/token_mult_prob_error")
    accuracy = _series(lines, "validation/accuracy")
    return RunSummary(
        steps=len(rewards),
        reward_first=mean(rewards[:EDGE]) if rewards else None,
        reward_last=mean(rewards[-EDGE:]) if rewards else None,
        refits=len(refits),
        refit_seconds_median=median(refit["seconds"] for refit in refits) if refits else None,
        bytes_reshard=sum(refit["bytes_by_path"].get("reshard", 0) for refit in refits),
        bytes_broadcast=sum(refit["bytes_by_path"].get("broadcast", 0) for refit in refits),
        weight_version=weight_version,
        token_mult_prob_error_max=max(errors) if errors else None,
        validation_accuracy=accuracy[-1] if accuracy else None,
        seconds_total=seconds_total,
        stopped_by=stopped_by,
    )


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def show(summary: RunSummary, folder: Path, console: Console) -> None:
    """The final panel: reward, refits, seconds, bytes by path, and where to look."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in _rows(summary, folder):
        table.add_row(label, value)
    console.print(Panel(table, title=f"run finished ({summary.stopped_by})", expand=False))


def _rows(summary: RunSummary, folder: Path) -> list[tuple[str, str]]:
    return [
        ("reward", f"{_number(summary.reward_first)} -> {_number(summary.reward_last)} over {summary.steps} steps"),
        ("validation accuracy", _number(summary.validation_accuracy)),
        ("refits", f"{summary.refits}, median {seconds(summary.refit_seconds_median)}"),
        ("bytes", f"reshard {size(summary.bytes_reshard)}, broadcast {size(summary.bytes_broadcast)}"),
        ("weight version", str(summary.weight_version)),
        ("token_mult_prob_error", f"at most {_number(summary.token_mult_prob_error_max, 4)}"),
        ("time", seconds(summary.seconds_total)),
        ("folder", _shown(folder)),
        ("metrics", _shown(folder / "metrics.jsonl")),
        ("plots", _shown(folder / "plots")),
    ]


def _shown(path: Path) -> str:
    """Relative to the current directory where the path lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    """``3.2 ms``, ``1.24 s``, ``2 min 05 s``."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 120:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def size(count: float) -> str:
    """Bytes in decimal units: ``3.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
