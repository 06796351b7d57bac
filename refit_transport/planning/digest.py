"""A fingerprint of everything a plan depends on, which all ranks compare before the first byte."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple

from refit_transport.layout.layout import LogicalParameter, SideDescription

from .plan import PLANNER_VERSION, PlanOptions


def plan_digest(
    source: SideDescription,
    sink: SideDescription,
    parameters: Sequence[LogicalParameter],
    domains: Sequence[Sequence[int]],
    options: PlanOptions,
) -> str:
    """sha256 in hexadecimal. The planner is a pure function of these and of its version, so equal digests mean equal
    plans."""
    digest = hashlib.sha256(f"planner {PLANNER_VERSION}".encode())
    for side in (source, sink):
        digest.update(b"\0layouts")
        for layout in side.layouts:
            cells = [(cell.region.start, cell.region.stop, cell.ranks) for cell in layout.cells]
            digest.update(repr((layout.shape, cells)).encode())
        lines = (f"{e.name}\t{e.dtype}\t{e.layout}\t{int(e.whole)}" for e in side.entries)
        digest.update(("\0entries" + "\n".join(lines)).encode())
    lines = (f"{p.name}\t{p.shape}\t{p.dtype}" for p in parameters)
    digest.update(("\0parameters" + "\n".join(lines)).encode())
    digest.update(repr(("domains", [tuple(domain) for domain in domains], astuple(options))).encode())
    return digest.hexdigest()
