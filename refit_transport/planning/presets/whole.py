"""Turns a description of shards into one of whole tensors, for parameters that are gathered and broadcast."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from refit_transport.layout.layout import Cell, Layout, SideDescription
from refit_transport.layout.region import Region


def want_whole(side: SideDescription, direct: Container[str]) -> SideDescription:
    """``side`` with every parameter whose name is not in ``direct`` wanted in full by all ranks of its layout."""
    layouts = dict.fromkeys(side.layouts)
    numbers = {layout: number for number, layout in enumerate(layouts)}
    whole_of: dict[int, int] = {}
    entries = []
    for entry in side.entries:
        if entry.name in direct:
            entries.append(entry)
            continue
        if entry.layout not in whole_of:
            layout = side.layouts[entry.layout]
            full = Layout(layout.shape, (Cell(Region.whole(layout.shape), layout.ranks),))
            whole_of[entry.layout] = numbers.setdefault(full, len(numbers))
        entries.append(replace(entry, layout=whole_of[entry.layout], whole=True))
    return SideDescription(tuple(numbers), tuple(entries))
