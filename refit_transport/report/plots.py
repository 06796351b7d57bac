"""Draws a run's reward, refit time and engine-trainer disagreement from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from refit_transport.report.run_log import METRICS, REFITS, read_lines

PROB_ERROR_LIMIT = 1.05
"""Above this, engine and trainer disagree enough to be a fault (rounding alone gives 1.01 to 1.02)."""
SMOOTHED_OVER = 5
PHASES_SHOWN = 4
Line = Mapping[str, Any]


def write_plots(folder: Path) -> list[Path]:
    """``plots/reward.png``, ``refit_time.png`` and ``token_mult_prob_error.png`` in the run's folder; those for which
    there are metrics. Returns their paths."""
    lines, refits = read_lines(folder / METRICS), read_lines(folder / REFITS)
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    drawn = []
    if series(lines, "train/reward")[0]:
        labels = {"title": "Reward", "xlabel": "step", "ylabel": "mean reward"}
        drawn.append(_plot(target / "reward.png", labels, lambda axes: _draw_reward(axes, lines)))
    if refits:
        labels = {"title": "Refit time", "xlabel": "weight version", "ylabel": "milliseconds"}
        drawn.append(_plot(target / "refit_time.png", labels, lambda axes: _draw_refits(axes, refits)))
    if series(lines, "train/token_mult_prob_error")[0]:
        labels = {"title": "Engine against trainer", "xlabel": "step", "ylabel": "token_mult_prob_error"}
        drawn.append(_plot(target / "token_mult_prob_error.png", labels, lambda axes: _draw_error(axes, lines)))
    return drawn


def _plot(path: Path, labels: Mapping[str, str], draw: Callable[[Any], None]) -> Path:
    # The object interface with the Agg canvas: pyplot would keep global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.5, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set(**labels)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)
    return path


def series(lines: Sequence[Line], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it is present."""
    present = [line for line in lines if line.get(name) is not None]
    return [line["step"] for line in present], [line[name] for line in present]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over the last ``width`` values (fewer at the start)."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _draw_reward(axes: Any, lines: Sequence[Line]) -> None:
    steps, rewards = series(lines, "train/reward")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, moving_mean(rewards, SMOOTHED_OVER), color="tab:blue", label=f"mean of {SMOOTHED_OVER} steps")
    steps, accuracy = series(lines, "validation/accuracy")
    if steps:
        axes.plot(steps, accuracy, "o--", color="tab:orange", markersize=4, label="validation accuracy")


def _draw_refits(axes: Any, refits: Sequence[Line]) -> None:
    """Time of every refit, and of its longest phases. Phases overlap, so they are lines and not a stack."""
    versions = [refit["version"] for refit in refits]
    total = [refit["seconds"] * 1e3 for refit in refits]
    for name in longest_phases(refits):
        axes.plot(versions, [refit["phases"].get(name, 0.0) * 1e3 for refit in refits], linewidth=0.8, label=name)
    middle = median(total)
    axes.plot(versions, total, ".-", color="black", linewidth=1, label="whole refit")
    axes.axhline(middle, color="black", linestyle=":", linewidth=1, label=f"median {middle:.3g} ms")
    # One slow first refit (it plans and compiles) should not flatten all the others.
    top = max(1.15 * max(total[1:] or total), 1.5 * middle)
    axes.set_ylim(0, top)
    if total[0] > top:
        axes.plot([], [], " ", label=f"first {total[0]:.4g} ms, off the scale")


def longest_phases(refits: Sequence[Line]) -> list[str]:
    """Names of the phases that took most time in sum, the longest first; none if there is but one."""
    total: dict[str, float] = {}
    for refit in refits:
        for name, seconds in refit["phases"].items():
            total[name] = total.get(name, 0.0) + seconds
    ranked = sorted(total, key=total.__getitem__, reverse=True)
    return ranked[:PHASES_SHOWN] if len(ranked) > 1 else []


def _draw_error(axes: Any, lines: Sequence[Line]) -> None:
    steps, errors = series(lines, "train/token_mult_prob_error")
    axes.plot(steps, errors, ".-", color="tab:purple", linewidth=1, label=f"largest {max(errors):.5g}")
    axes.axhline(PROB_ERROR_LIMIT, color="tab:red", linestyle="--", linewidth=1, label=f"limit {PROB_ERROR_LIMIT}")
    axes.ticklabel_format(axis="y", useOffset=False)
