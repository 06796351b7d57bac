"""The cost model beside published measurements: one mixture-of-experts layer, and refits of whole models.

One set of constants serves every row. The published systems are described by what is public about them: they run the
phases of a transfer one after the other, and gather-and-broadcast has one root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from refit_transport.layout.layout import Cell, Entry, Layout, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.planning.cost import lower_bound, predict
from refit_transport.planning.plan import PlanOptions
from refit_transport.planning.planner import plan_refit
from refit_transport.planning.presets.clusters import CLUSTERS, Cluster
from refit_transport.planning.presets.models import load_model
from refit_transport.planning.presets.parallel import Generation, Training, read_layout

from .plan_study import Job, study
from .plan_units import seconds

LAYER = LogicalParameter("experts.up_proj", (256, 2048, 7168), "bfloat16")
MIB_PER_MB = 2**20 / 1e6
"""The published layer figures count its 7168 MiB as 7168 MB, so their 50 GB/s is 50,000 MiB/s."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Published milliseconds for one layer, 16 expert-parallel sources to ``replicas`` engines of 8 ranks."""

    replicas: int
    hierarchical: float
    flat: float
    bound: float = 8.96


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Published seconds of a whole refit; None where no figure is public."""

    model: str
    train: str
    gen: str
    cluster: str
    broadcast: float | None
    reshard: float
    note: str = ""


LAYER_ROWS = (LayerRow(2, 10.25, 20.86), LayerRow(4, 13.83, 35.84), LayerRow(8, 9.78, 77.26))
MODEL_ROWS = (
    ModelRow("qwen3-235b-a22b", "tp=2,cp=2,pp=4,ep=16", "tp=8,dp=8", "dgx-h100", 6.4, 1.9,
             "layout published for GB200, assumed on H100"),
    ModelRow("deepseek-v3", "pp=16,ep=16", "tp=32,dp=8", "dgx-h100", 14.9, 2.6),
    ModelRow("deepseek-v3", "pp=16,ep=16", "tp=32,dp=8", "dgx-gb200", 6.1, 2.3,
             "layout published for H100, assumed on GB200"),
    ModelRow("nemotron-3-ultra", "tp=8,ep=32,pp=2", "tp=8,dp=8", "dgx-gb200", 8.2, 2.3),
    ModelRow("qwen3.8-2.4t-a95b", "pp=8,ep=32", "tp=32,dp=8", "dgx-gb200", None, 4.3,
             "layout not published: assumed"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerResult:
    """Predicted milliseconds of one layer."""

    row: LayerRow
    hierarchical: float
    flat: float
    bound: float


def layer_cluster() -> Cluster:
    """GB200 with the port rate in the published table's unit; every other constant is the preset's."""
    return replace(CLUSTERS["dgx-gb200"], nic_rate=50e9 * MIB_PER_MB)


def layer_results() -> Iterator[LayerResult]:
    """Predictions for the rows of the layer table."""
    for row in LAYER_ROWS:
        source, sink, domains = layer_case(row.replicas)
        ranks = range(16), range(16, 16 + 8 * row.replicas)
        cluster, times = layer_cluster(), []
        for once in (True, False):
            options = PlanOptions(bucket_bytes=4 << 30, once_per_domain=once, relay="never")
            plan = plan_refit(source, sink, (LAYER,), domains, options)
            predicted = predict(plan, cluster, senders=ranks[0], receivers=ranks[1], overlap=False)
            times.append(1e3 * predicted.seconds)
            if once:
                bound = 1e3 * lower_bound(plan, cluster, source, ranks[0]).seconds
        yield LayerResult(row, times[0], times[1], bound)


def layer_case(replicas: int) -> tuple[SideDescription, SideDescription, tuple[tuple[int, ...], ...]]:
    """Both sides and the domains of the layer table: EP16 in one domain, ``replicas`` times TP8 in another."""
    experts, width, hidden = LAYER.shape
    sources = [Cell(Region((16 * e, 0, 0), (16 * e + 16, width, hidden)), (e,)) for e in range(experts // 16)]
    part = width // 8
    sinks = [Cell(Region((0, part * t, 0), (experts, part * t + part, hidden)),
                  tuple(16 + t + 8 * r for r in range(replicas))) for t in range(8)]  # fmt: skip
    sides = [SideDescription((Layout(LAYER.shape, tuple(cells)),), (Entry(LAYER.name, LAYER.dtype, 0),))
             for cells in (sources, sinks)]  # fmt: skip
    return sides[0], sides[1], (tuple(range(16)), tuple(range(16, 16 + 8 * replicas)))


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Predicted seconds of a whole refit, and its bound."""

    row: ModelRow
    broadcast: float
    reshard: float
    """Phases one after the other, as in the published system."""
    overlapped: float
    """Phases overlapped, as this package runs them."""
    bound: float


def model_results() -> Iterator[ModelResult]:
    """Predictions for the rows of the whole-model table: resharding with scope ``ffn``, and gather-and-broadcast from a
    single root."""
    for row in MODEL_ROWS:
        training, generation = read_layout(row.train, Training, "--train"), read_layout(row.gen, Generation, "--gen")
        job = Job(load_model(row.model), training, generation, CLUSTERS[row.cluster])
        ours = study(job, ("ffn",), broadcast=False)
        single = study(replace(job, options=PlanOptions(broadcast_root="single")), ())
        serial = predict(ours.main.plan, job.cluster, senders=job.trainers, receivers=job.generators, overlap=False)
        broadcast, overlapped = single.main.prediction.seconds, ours.main.prediction.seconds
        yield ModelResult(row, broadcast, serial.seconds, overlapped, ours.bound.seconds)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table as text: its title, its columns and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(cells)} |" for cells in lines), ""])

    def table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            table.add_row(*row)
        return table


def layer_sheet() -> Sheet:
    """The layer table, milliseconds."""
    rows = [
        (str(r.row.replicas), f"{r.row.hierarchical:.2f}", f"{r.hierarchical:.2f}",
         _deviation(r.hierarchical, r.row.hierarchical), f"{r.row.flat:.2f}", f"{r.flat:.2f}",
         _deviation(r.flat, r.row.flat), f"{r.row.bound:.2f}", f"{r.bound:.2f}")
        for r in layer_results()
    ]  # fmt: skip
    columns = ("replicas", "once per domain, published", "predicted", "deviation", "flat, published", "predicted",
               "deviation", "bound, published", "computed")  # fmt: skip
    return Sheet("One layer [256, 2048, 7168] bf16, EP16 to TP8, milliseconds", columns, rows)


def model_sheet() -> Sheet:
    """The whole-model table."""
    rows = []
    for m in model_results():
        row = m.row
        public = f"{row.broadcast:.1f} s" if row.broadcast else "-"
        layouts = f"{row.train} to {row.gen}" + (f" ({row.note})" if row.note else "")
        rows.append((
            row.model, row.cluster, layouts, seconds(m.bound), f"{row.reshard:.1f} s", seconds(m.reshard),
            _deviation(m.reshard, row.reshard), seconds(m.overlapped), public, seconds(m.broadcast),
            _deviation(m.broadcast, row.broadcast) if row.broadcast else "-",
        ))  # fmt: skip
    columns = ("model", "cluster", "layouts", "bound", "reshard, published", "predicted, phases in turn", "deviation",
               "predicted, overlapped", "broadcast, published", "predicted, one root", "deviation")  # fmt: skip
    return Sheet("Whole models", columns, rows)


def print_reference(markdown: bool = False, console: Console | None = None) -> None:
    """Print both tables, for a terminal or as the markdown of ``docs/planning.md``."""
    console = console or Console()
    for sheet in (layer_sheet, model_sheet):
        made = sheet()
        if markdown:
            print(made.markdown())
        else:
            console.print(made.table())


def _deviation(predicted: float, public: float) -> str:
    return f"{predicted / public - 1:+.1%}"
