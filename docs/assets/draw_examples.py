"""Draws the examples of docs/planning.md from what the planner plans. Run: python docs/assets/draw_examples.py"""

from __future__ import annotations

from pathlib import Path

from refit_transport.layout.layout import Cell, Entry, Layout, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.planning.plan import Link, PlanOptions, Transfer
from refit_transport.planning.planner import plan_refit

STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #3a4552; } .title { font-weight: 650; } .small { font-size: 11.5px; }
.box { fill: #ffffff; stroke: #c4ccd6; } .grid { stroke: #ffffff; stroke-width: 1; fill-opacity: .8; }
.network { stroke: #1f6fb2; fill: #1f6fb2; } .domain { stroke: #c8740a; fill: #c8740a; }
.arrow { fill: none; stroke-width: 2; } .frame { fill: none; stroke: #9aa6b4; stroke-dasharray: 4 3; }
.light { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #c9d2dc; } .box { fill: #1b212a; stroke: #3b4552; }
.grid { stroke: #12161c; } .light { fill: #12161c; }
.network { stroke: #5aa9e6; fill: #5aa9e6; } .domain { stroke: #f0a848; fill: #f0a848; } }
</style>"""
COLOURS = ("#1f6fb2", "#2d8a6e", "#7b61a8", "#c8740a", "#a8485f", "#5f7f2e", "#2a7f9e", "#8a5a3c")
CELL = 26


def side(shape: tuple[int, ...], cells: list[Cell]) -> SideDescription:
    return SideDescription((Layout(shape, tuple(sorted(cells))),), (Entry("w", "bfloat16", 0),))


def plan(shape: tuple[int, ...], sources: list[Cell], sinks: list[Cell], domains, **options) -> list[Transfer]:
    parameter = LogicalParameter("w", shape, "bfloat16")
    made = plan_refit(side(shape, sources), side(shape, sinks), [parameter], domains, PlanOptions(**options))
    return list(made.groups[0].transfers)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def document(width: int, height: int, label: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, *parts, "</svg>", ""])


def matrix(x: float, y: float, colour_of, label_of) -> list[str]:
    """An 8 x 8 matrix whose cells are coloured and, where ``label_of`` says so, labelled."""
    parts, labels = [], []
    for row in range(8):
        for column in range(8):
            place = f'x="{x + column * CELL:g}" y="{y + row * CELL:g}" width="{CELL}" height="{CELL}"'
            parts.append(f'<rect {place} class="grid" fill="{colour_of(row, column)}"/>')
            if label := label_of(row, column):
                labels.append(text(x + column * CELL + CELL, y + row * CELL + 2 * CELL + 5, label, "light"))
    return parts + labels


def rows_to_columns() -> str:
    """8 x 8: rows over 2 trainers, columns over 4 inference ranks."""
    sources = [Cell(Region((4 * i, 0), (4 * i + 4, 8)), (i,)) for i in range(2)]
    sinks = [Cell(Region((0, 2 * i), (8, 2 * i + 2)), (2 + i,)) for i in range(4)]
    transfers = plan((8, 8), sources, sinks, [(0, 1), (2, 3, 4, 5)])
    of_cell = {(row, column): t for t in transfers for row in range(t.region.start[0], t.region.stop[0])
               for column in range(t.region.start[1], t.region.stop[1])}  # fmt: skip
    corner = {t.region.start: f"{t.src}&#8594;{t.dst}" for t in transfers}
    top, width = 52, 8 * CELL
    lefts = [20, 290, 560]
    parts = [text(lefts[i] + width / 2, 22, words, "title") for i, words in
             enumerate(("trainers hold rows", "8 transfers of 4 x 2", "engines need columns"))]  # fmt: skip
    parts += matrix(lefts[0], top, lambda r, _: COLOURS[of_cell[r, 0].src], lambda *_: "")
    parts += [text(lefts[0] + width / 2, top + (4 * i + 2) * CELL + 5, f"rank {i}", "light") for i in range(2)]
    parts += matrix(lefts[1], top, lambda r, c: COLOURS[(4 * of_cell[r, c].src + of_cell[r, c].dst - 2) % 8],
                    lambda r, c: corner.get((r, c), ""))  # fmt: skip
    parts += matrix(lefts[2], top, lambda _, c: COLOURS[of_cell[0, c].dst + 2], lambda *_: "")
    parts += [text(lefts[2] + (2 * i + 1) * CELL, top - 8, f"rank {i + 2}", "small") for i in range(4)]
    words = "Each inference rank receives a 4 x 2 region from each trainer, and nothing else."
    parts.append(text(394, top + width + 26, words, "small"))
    return document(790, top + width + 40, "8 by 8 matrix, rows to columns", parts)


def once_per_domain() -> str:
    """TP4 to TP2 x DP2: one copy into the domain, exchanged inside it, against flat point to point."""
    shape, quarter = (4096, 1024), 1024
    sources = [Cell(Region((quarter * i, 0), (quarter * i + quarter, 1024)), (i,)) for i in range(4)]
    sinks = [Cell(Region((2 * quarter * i, 0), (2 * quarter * (i + 1), 1024)), (4 + i, 6 + i)) for i in range(2)]
    domains = [(0, 1, 2, 3), (4, 5, 6, 7)]
    parts = []
    for left, title, options in (
        (10, "once per domain", {}),
        (420, "flat, for comparison", {"once_per_domain": False, "relay": "never"}),
    ):
        transfers = plan(shape, sources, sinks, domains, **options)
        parts += panel(left, title, transfers)
    parts += legend(10, 330)
    return document(800, 350, "TP4 to TP2 x DP2, once per domain and flat", parts)


def panel(left: float, title: str, transfers: list[Transfer]) -> list[str]:
    x = {rank: left + 52 + 92 * (rank % 4) for rank in range(8)}
    y = {rank: 70 if rank < 4 else 232 for rank in range(8)}
    crossing = sum(t.link is Link.NETWORK for t in transfers)
    parts = [text(left + 190, 14, f"{title}: {crossing} network transfers", "title")]
    for top, words in ((38, "trainers, TP4"), (200, "engines, TP2 x DP2, one fast-link domain")):
        height = 66 if top < 100 else 100
        parts.append(f'<rect x="{left + 2}" y="{top}" width="368" height="{height}" rx="8" class="frame"/>')
        parts.append(text(left + 10, top + (-5 if top < 100 else height + 15), words, "small", "start"))
    for t in transfers:
        inside = t.link is Link.DOMAIN
        a, b = x[t.src] + (5 if t.src < t.dst else -5) * inside, x[t.dst] + (5 if t.src < t.dst else -5) * inside
        shift = (b - a) * 0.06
        path = (f"M{a} {y[t.src] + 16} Q{(a + b) / 2} {y[t.src] + (66 if t.src < t.dst else 44)} {b} {y[t.dst] + 18}"
                if inside else f"M{a + shift:.1f} {y[t.src] + 18} L{b - shift:.1f} {y[t.dst] - 21}")  # fmt: skip
        kind = "domain" if inside else "network"
        parts.append(f'<path d="{path}" class="arrow {kind}" style="fill:none"/>')
        if not inside:
            parts.append(f'<circle cx="{b - shift:.1f}" cy="{y[t.dst] - 19}" r="3.5" class="network"/>')
    for rank in range(8):
        parts.append(f'<rect x="{x[rank] - 36}" y="{y[rank] - 16}" width="72" height="32" rx="6" class="box"/>')
        held = f"quarter {rank}" if rank < 4 else f"half {rank % 2}"
        parts.append(text(x[rank], y[rank] - 1, f"rank {rank}", "small"))
        parts.append(text(x[rank], y[rank] + 12, held, "small"))
    return parts


def legend(x: float, y: float) -> list[str]:
    parts = []
    for shift, kind, words in ((0, "network", "over the network"), (150, "domain", "inside the domain")):
        parts.append(f'<path d="M{x + shift} {y} h24" class="arrow {kind}"/>')
        parts.append(text(x + shift + 30, y + 4, words, "small", "start"))
    return parts


EXAMPLES = {"example-rows-to-columns.svg": rows_to_columns, "example-once-per-domain.svg": once_per_domain}

if __name__ == "__main__":
    for name, draw in EXAMPLES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
