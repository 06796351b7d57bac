"""Prints the figures of a benchmark for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = {
    "nccl_reshard": "nccl_reshard",
    "gather_broadcast": "gather_broadcast, single root",
    "gather_broadcast_every": "gather_broadcast, every root",
    "parameter_loop": "per-parameter loop over gloo",
    "checkpoint": "checkpoint, local disk",
    "stream": "plain two-process stream",
}
WIDTH = 140
"""Columns that the table needs; a terminal that is narrower wraps lines, which reads better than cut figures."""


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    """One row per transport, the targets below."""
    console = console or Console(width=max(WIDTH, Console().width))
    console.print(f"\n[bold]{summary['title']}[/bold]")
    console.print(_circumstances(summary))
    console.print(_transports(summary))
    if summary["targets"]:
        console.print(_targets(summary))


def _circumstances(summary: dict[str, Any]) -> str:
    cluster = summary["config"]["cluster"]
    network = f"emulated, {cluster['rate']} per {cluster['nic']}" if summary["emulated"] else "one host, not emulated"
    load = summary["machine"]["load_average"][0]
    return (
        f"{summary['tensors']} tensors, {summary['bytes_model'] / 1e6:.1f} MB, scope {summary['config']['scope']}; "
        f"{network}; {summary['rounds']} rounds; priority {', '.join(summary['priority'])}; "
        f"{summary['machine']['cpus']} CPUs, load {load:.1f}; every refit's contents checked"
    )


def _transports(summary: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ("transport", "seconds", "min-max", "of bound", "predicted", "network MB", "/min", "busiest card", "GB/s")
    for column in (*columns, "extra MB", "slower"):
        table.add_column(column, justify="left" if column == "transport" else "right")
    first = next(iter(summary["transports"]))
    for name, figures in summary["transports"].items():
        ratio = summary["ratios"].get(f"{name}/{first}")
        times = figures["seconds_all"]
        table.add_row(
            NAMES[name],
            f"{figures['seconds_median']:.3f}",
            f"{min(times):.3f}-{max(times):.3f}",
            _number(figures["share_of_bound"], "{:.3f}"),
            _number(figures["predicted_seconds"], "{:.3f}"),
            _number(figures["bytes_network"], "{:.1f}", 1e-6),
            _number(figures["bytes_over_minimum"], "{:.4f}"),
            _number(figures["busiest_nic_over_mean"], "{:.3f}"),
            f"{figures['gb_per_second']:.2f}",
            f"{figures['peak_extra_bytes'] / 1e6:.1f}",
            _number(ratio, "{:.2f}x"),
        )
    return table


def _targets(summary: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("target", "required", "measured", ""):
        table.add_column(column, justify="left" if column == "target" else "right")
    for key, target in summary["targets"].items():
        sign = ">=" if key.startswith("min_") else "<="
        missed = "[yellow]not run[/yellow]" if target["measured"] is None else "[red]missed[/red]"
        verdict = "[green]met[/green]" if target["met"] else missed
        name = key.split("_", 1)[1]
        table.add_row(name, f"{sign} {target['required']:g}", _number(target["measured"], "{:.4g}"), verdict)
    return table


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
