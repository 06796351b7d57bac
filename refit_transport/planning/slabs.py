"""Cuts a parameter that does not fit into one bucket into slabs of rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .plan import PlanError
from .transfers import Link, TransferTable

SHORTEST_RUN = 256
"""Bytes. Slabs of the last dimension are not made narrower than this as long as another dimension can be cut."""


def slab_rows(
    shape: tuple[int, ...], itemsize: int, table: TransferTable, limit: int, world: int
) -> tuple[int, list[tuple[int, int]]]:
    """The dimension to cut, and row ranges of which each makes no rank stage more than ``limit`` bytes.

    Preferred is the dimension along which the fewest regions begin, so that every rank takes part in every slab. Raises
    PlanError when a single row is too large in every dimension.
    """
    best: tuple[tuple[bool, int, int], int, int] | None = None
    smallest = None
    for dim, extent in enumerate(shape):
        row = _busiest_row(table, dim, itemsize, world)
        smallest = row if smallest is None else min(smallest, row)
        if row > limit:
            continue
        rows = min(limit // max(row, 1), extent)
        narrow = dim == len(shape) - 1 and dim > 0 and rows * itemsize < SHORTEST_RUN
        choice = ((narrow, len(np.unique(table.start[:, dim])), dim), dim, rows)
        best = choice if best is None or choice < best else best
    if best is None:
        raise PlanError(
            f"one row of a parameter of shape {shape} makes a rank stage {smallest} bytes, more than bucket_bytes "
            f"{limit}: raise bucket_bytes"
        )
    _, dim, rows = best
    return dim, _equal_parts(shape[dim], rows)


def _equal_parts(extent: int, rows: int) -> list[tuple[int, int]]:
    parts = -(-extent // rows)
    edges = [extent * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))


def _busiest_row(table: TransferTable, dim: int, itemsize: int, world: int) -> int:
    """Most bytes that one rank stages, in plus out, for one row of ``dim``."""
    start, stop = table.start[:, dim], table.stop[:, dim]
    nbytes = np.where(table.link != Link.LOCAL, table.numel // np.maximum(stop - start, 1) * itemsize, 0)
    busiest = 0
    for edge in np.unique(start).tolist():
        here = (start <= edge) & (edge < stop)
        total = np.bincount(table.src[here], nbytes[here], world) + np.bincount(table.dst[here], nbytes[here], world)
        busiest = max(busiest, int(total.max(initial=0)))
    return busiest
