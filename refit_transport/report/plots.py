"""Draws a run's reward, refit time and engine-trainer disagreement from its ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refit_transport.report.run_log import read_metrics

REFIT_SECONDS = "timing/train/prepare_for_generation/transfer_and_update_weights"
PROB_ERROR_LIMIT = 1.05
"""Above this, engine and trainer disagree enough to be a fault (rounding alone gives 1.01 to 1.02)."""
SMOOTHED_OVER = 5
Line = Mapping[str, Any]


def write_plots(folder: Path) -> list[Path]:
    """``plots/reward.png``, ``refit_time.png`` and ``token_mult_prob_error.png`` in the run's folder; those for which
    there are metrics. Returns their paths."""
    lines = read_metrics(folder)
    target = folder / "plots"
    target.mkdir(exist_ok=True)
    drawn = (
        _plot(target / "reward.png", lines, "Reward", "mean reward", _draw_reward, ("train/reward",)),
        _plot(target / "refit_time.png", lines, "Refit", "seconds", _draw_refit, (REFIT_SECONDS,)),
        _plot(
            target / "token_mult_prob_error.png",
            lines,
            "Engine and trainer probabilities",
            "token_mult_prob_error",
            _draw_error,
            ("train/token_mult_prob_error",),
        ),
    )
    return [path for path in drawn if path is not None]


def _plot(
    path: Path,
    lines: Sequence[Line],
    title: str,
    label: str,
    draw: Callable[[Any, Sequence[Line]], None],
    needs: Sequence[str],
) -> Path | None:
    if not all(series(lines, name)[0] for name in needs):
        return None
    # The object interface with the Agg canvas: pyplot would keep global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes, lines)
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
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


def _draw_refit(axes: Any, lines: Sequence[Line]) -> None:
    steps, seconds = series(lines, REFIT_SECONDS)
    middle = sorted(seconds)[len(seconds) // 2]
    axes.plot(steps, seconds, ".-", color="tab:green", linewidth=1)
    axes.axhline(middle, color="black", linestyle=":", linewidth=1, label=f"median {middle:.3g} s")
    axes.set_ylim(bottom=0)


def _draw_error(axes: Any, lines: Sequence[Line]) -> None:
    steps, errors = series(lines, "train/token_mult_prob_error")
    axes.plot(steps, errors, ".-", color="tab:purple", linewidth=1, label=f"largest {max(errors):.5g}")
    axes.axhline(PROB_ERROR_LIMIT, color="tab:red", linestyle="--", linewidth=1, label=f"limit {PROB_ERROR_LIMIT}")
    axes.ticklabel_format(axis="y", useOffset=False)
