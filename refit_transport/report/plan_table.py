"""A study as terminal tables that explain themselves to a newcomer."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from refit_transport.planning.cost import PHASES

from .plan_json import summary
from .plan_study import Study
from .plan_units import count, seconds, size

PHASE_MEANING = {
    "pack": "copy into send buffers",
    "network": "between domains",
    "in_domain": "over the fast link",
    "unpack": "copy into the live tensors",
    "load": "the model's own loader, for whole tensors",
}


def print_study(study: Study, console: Console | None = None) -> None:
    """Print the comparison of transports, where the time goes, and the assumptions."""
    (console or Console()).print(Group(*_parts(study)))


def _parts(study: Study) -> list[RenderableType]:
    data = summary(study)
    shown = [(outcome.title, data["transports"][outcome.transport][outcome.scope]) for outcome in study.outcomes]
    return [_head(study, data), _comparison(shown), _phases(shown), _notes(study)]


def _head(study: Study, data: dict) -> Text:
    job = study.job
    model, bound = data["model"], study.bound
    return Text.assemble(
        ("Refit plan", "bold"), f"  {job.model.name}, {size(model['bytes'])} in {count(model['tensors'])} tensors\n",
        f"{job.training.world} trainer ranks ({job.training})  ->  {job.generation.world} inference ranks "
        f"({job.generation})  on {job.cluster.name}, {len(job.domains)} fast-link domains\n",
        "Least time that the links allow: ", (seconds(bound.seconds), "bold"), f" (limited by {bound.limit}); ",
        f"planned in {study.main.plan_seconds:.2f} s, digest {data['digest'][:12]}\n",
    )  # fmt: skip


def _comparison(shown: list[tuple[str, dict]]) -> Table:
    table = Table(title="What each transport would take", title_justify="left", header_style="bold")
    table.add_column("")
    for title, _ in shown:
        table.add_column(title, justify="right", overflow="fold")
    rows = {
        "predicted time": lambda f: seconds(f["predicted_seconds"]),
        "share of the bound": lambda f: f"{f['bound_share']:.0%}",
        "limited by": lambda f: f["limited_by"],
        "over the network": lambda f: size(f["bytes"]["network"]),
        "inside domains": lambda f: size(f["bytes"]["in_domain"]),
        "copied locally": lambda f: size(f["bytes"]["local"]),
        "resharded / broadcast tensors": lambda f: (
            f"{count(f['bytes_by_path']['reshard']['tensors'])} / {count(f['bytes_by_path']['broadcast']['tensors'])}"
        ),
        "busiest sender / mean": lambda f: f"{f['busiest_send_over_mean']:.2f}",
        "busiest receiver / mean": lambda f: f"{f['busiest_recv_over_mean']:.2f}",
        "messages": lambda f: count(f["messages"]),
        "buckets": lambda f: count(f["buckets"]),
        "extra memory per rank, at most": lambda f: size(f["peak_extra_bytes_per_rank"]),
    }
    for label, pick in rows.items():
        style = "bold" if label == "predicted time" else ""
        table.add_row(label, *(pick(figures) for _, figures in shown), style=style)
    return table


def _phases(shown: list[tuple[str, dict]]) -> Table:
    table = Table(title="How long each resource is busy (phases overlap, so they do not add up)",
                  title_justify="left", header_style="bold")  # fmt: skip
    table.add_column("phase")
    for title, _ in shown:
        table.add_column(title, justify="right", overflow="fold")
    for phase in PHASES:
        label = Text.assemble(phase.replace("_", "-"), (f"  {PHASE_MEANING[phase]}", "dim"))
        table.add_row(label, *(seconds(figures["phases"][phase]) for _, figures in shown))
    return table


def _notes(study: Study) -> Text:
    return Text("Assumptions\n" + "\n".join(f"  {note}" for note in study.assumptions), style="dim")
