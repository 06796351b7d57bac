"""Short ways to describe both sides of a refit in a test, and to read a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refit_transport.layout import Entry, Layout, LogicalParameter, Mesh, SideDescription, mesh_layout
from refit_transport.layout.layout import ITEMSIZE
from refit_transport.planning import Link, Plan, PlanOptions, check_plan, plan_refit

Side = dict[str, Layout]
FINE = PlanOptions(stripe_bytes=1)
"""Stripes of any size, so that small tensors are shared out like large ones."""


def on_mesh(
    shape: Sequence[int], ranks: Sequence[int], placements: Sequence[object], mesh: Sequence[int] = ()
) -> Layout:
    """``placements`` over ``ranks`` arranged as ``mesh`` (one dimension if not given)."""
    return mesh_layout(tuple(shape), Mesh(tuple(mesh) or (len(ranks),), tuple(ranks)), placements)


def side(layouts: Side, dtype: str = "bfloat16", whole: bool = False) -> SideDescription:
    numbers = {layout: number for number, layout in enumerate(dict.fromkeys(layouts.values()))}
    entries = tuple(Entry(name, dtype, numbers[layout], whole) for name, layout in layouts.items())
    return SideDescription(tuple(numbers), entries)


def planned(
    source: Side,
    sink: Side,
    domains: Sequence[Sequence[int]],
    options: PlanOptions = FINE,
    *,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    whole: bool = False,
    check: bool = True,
) -> Plan:
    """The plan, after the golden check has accepted it."""
    parameters = [LogicalParameter(name, layout.shape, dtypes[0]) for name, layout in source.items()]
    held, needed = side(source, dtypes[0]), side(sink, dtypes[1], whole)
    plan = plan_refit(held, needed, parameters, domains, options)
    if check:
        check_plan(plan, held, needed)
    return plan


def bytes_by_rank(plan: Plan, link: Link) -> tuple[np.ndarray, np.ndarray]:
    """(sent, received) by rank over one class of links, for all members."""
    world = max(plan.world) + 1
    sent, received = np.zeros(world), np.zeros(world)
    for group in plan.groups:
        table = group.transfers
        mine = table.link == link
        nbytes = table.numel[mine] * ITEMSIZE[group.wire_dtype] * len(group.members)
        sent += np.bincount(table.src[mine], nbytes, world)
        received += np.bincount(table.dst[mine], nbytes, world)
    return sent, received


def pairs(plan: Plan, link: Link) -> list[tuple[int, int]]:
    """(source, destination) of every transfer over one class of links, sorted."""
    return sorted((t.src, t.dst) for group in plan.groups for t in group.transfers if t.link == link)
