"""Draws the figures of a benchmark: seconds per transport against the bound, and network bytes against the minimum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .table import NAMES

OURS, OTHERS, BOUND = "#1f6f8b", "#b8b8b8", "#c0392b"


def draw(summary: dict[str, Any], path: Path) -> None:
    """Write the picture to ``path``; its suffix chooses the format."""
    names = list(summary["transports"])[::-1]
    counted = [name for name in names if summary["transports"][name]["bytes_over_minimum"] is not None]
    figure, axes = plt.subplots(
        1, 2 if counted else 1, figsize=(12 if counted else 7.5, 1.6 + 0.55 * len(names)), squeeze=False, sharey=True
    )
    _seconds(axes[0][0], summary, names)
    if counted:
        _bytes(axes[0][1], summary, names)
    figure.suptitle(summary["title"], fontsize=12, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _seconds(axes: Axes, summary: dict[str, Any], names: list[str]) -> None:
    figures = [summary["transports"][name] for name in names]
    medians = [entry["seconds_median"] for entry in figures]
    axes.barh(range(len(names)), medians, color=_colours(summary, names), height=0.6)
    for row, entry in enumerate(figures):
        axes.plot(entry["seconds_all"], [row] * len(entry["seconds_all"]), "|", color="black", markersize=9)
        share = f", {entry['share_of_bound']:.3f} of bound" if entry["share_of_bound"] else ""
        axes.text(max(entry["seconds_all"]), row, f"  {entry['seconds_median']:.3f} s{share}", va="center", fontsize=9)
    bound = figures[-1]["bound_seconds"]
    if bound:
        axes.axvline(bound, color=BOUND, linewidth=1.2)
        axes.text(bound, len(names) - 0.45, " bound", color=BOUND, fontsize=9, va="bottom")
    axes.set_yticks(range(len(names)), [NAMES[name] for name in names])
    axes.set_xlim(0, max(max(entry["seconds_all"]) for entry in figures) * 1.45)
    axes.set_xlabel("seconds per refit: median (bar), each round (ticks)")
    _plain(axes)


def _bytes(axes: Axes, summary: dict[str, Any], names: list[str]) -> None:
    shares = [summary["transports"][name]["bytes_over_minimum"] or 0.0 for name in names]
    axes.barh(range(len(names)), shares, color=_colours(summary, names), height=0.6)
    for row, name in enumerate(names):
        balance = summary["transports"][name]["busiest_nic_over_mean"]
        note = f"  {shares[row]:.3f}x" + (f", busiest card {balance:.2f} of the mean" if balance else "")
        axes.text(shares[row], row, note, va="center", fontsize=9)
    axes.axvline(1.0, color=BOUND, linewidth=1.2)
    axes.set_xlim(0, max(*shares, 1.0) * 1.8)
    axes.set_xlabel("network bytes over the minimum")
    _plain(axes)


def _colours(summary: dict[str, Any], names: list[str]) -> list[str]:
    first = next(iter(summary["transports"]))
    return [OURS if name == first else OTHERS for name in names]


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(-0.6, len(axes.get_yticks()) - 0.1)
