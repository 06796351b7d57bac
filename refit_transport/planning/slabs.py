"""Cuts a parameter that does not fit into one bucket into slabs of rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from .plan import PlanError

SHORTEST_RUN = 256
"""Bytes. Slabs of the last dimension are not made narrower than this as long as another dimension can be cut."""


def choose_slabs(
    shape: tuple[int, ...],
    itemsize: int,
    start: np.ndarray,
    stop: np.ndarray,
    numel: np.ndarray,
    staged: Callable[[np.ndarray], np.ndarray],
    limit: int,
) -> tuple[int, list[tuple[int, int]]]:
    """The dimension to cut, and row ranges of which each makes no rank stage more than ``limit`` bytes.

    ``start``, ``stop`` and ``numel`` describe the transfers, ``staged`` gives bytes by rank for elements by transfer.
    Preferred is the dimension along which the fewest regions begin, so that every rank takes part in every slab. Raises
    PlanError when a single row is too large in every dimension.
    """
    best: tuple[tuple[bool, int, int], int] | None = None
    smallest = 0
    for dim, extent in enumerate(shape):
        row = _busiest_row(start[:, dim], stop[:, dim], numel, staged)
        smallest = min(smallest or row, row)
        if row > limit:
            continue
        rows = min(limit // max(row, 1), extent)
        narrow = dim == len(shape) - 1 and dim > 0 and rows * itemsize < SHORTEST_RUN
        choice = ((narrow, len(np.unique(start[:, dim])), dim), rows)
        best = choice if best is None or choice < best else best
    if best is None:
        raise PlanError(
            f"one row of a parameter of shape {shape} makes a rank stage {smallest} bytes, more than the {limit} "
            "bytes of half a bucket: raise bucket_bytes"
        )
    (_, _, dim), rows = best
    return dim, _equal_parts(shape[dim], rows)


def _equal_parts(extent: int, rows: int) -> list[tuple[int, int]]:
    parts = -(-extent // rows)
    return list(pairwise(extent * part // parts for part in range(parts + 1)))


def _busiest_row(
    start: np.ndarray, stop: np.ndarray, numel: np.ndarray, staged: Callable[[np.ndarray], np.ndarray]
) -> int:
    """Most bytes that one rank stages for one row."""
    of_row = numel // np.maximum(stop - start, 1)
    edges = np.unique(start).tolist()
    return max(int(staged(np.where((start <= edge) & (edge < stop), of_row, 0)).max(initial=0)) for edge in edges)
