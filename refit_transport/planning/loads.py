"""How many bytes a member of a group makes each rank stage, worked out once per template."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .route import Template
from .slabs import choose_slabs


@dataclass(frozen=True, slots=True, eq=False)
class TemplateLoad:
    """What one member stages, in slot codes and joint ranks, for each slab that it has to be cut into."""

    slab_dim: int
    slabs: tuple[tuple[int, int], ...]
    """Row ranges along ``slab_dim``; one when the member fits into a bucket."""
    ranks: np.ndarray
    """int64 [ranks]: codes and joint ranks; no rank occurs as both."""
    nbytes: np.ndarray
    """int64 [slabs, ranks]: bytes of messages in plus out."""


def template_load(
    template: Template, slot_ranks: np.ndarray, shape: tuple[int, ...], itemsize: int, limit: int
) -> TemplateLoad:
    """``slot_ranks`` are those of any group of the template: what they have in common with the destination's ranks is
    the same for all. Raises PlanError when a single row is larger than ``limit`` bytes."""
    src, dst = _by_code(template.src, slot_ranks), _by_code(template.dst, slot_ranks)
    ranks, index = np.unique(np.concatenate([src, dst]), return_inverse=True)
    ends = index.reshape(2, -1)
    remote = src != dst

    def staged(numel: np.ndarray) -> np.ndarray:
        weights = np.where(remote, numel * itemsize, 0)
        total = np.bincount(ends[0], weights, len(ranks)) + np.bincount(ends[1], weights, len(ranks))
        return total.astype(np.int64)

    full = staged(template.numel)
    rows = shape[0] if shape else 1
    if full.max(initial=0) <= limit:
        return TemplateLoad(0, ((0, rows),), ranks, full[None])
    dim, slabs = choose_slabs(shape, itemsize, template.start, template.stop, template.numel, staged, limit)
    start, stop = template.start[:, dim], template.stop[:, dim]
    of_row = template.numel // np.maximum(stop - start, 1)
    parts = [staged(of_row * np.maximum(np.minimum(stop, b) - np.maximum(start, a), 0)) for a, b in slabs]
    return TemplateLoad(dim, tuple(slabs), ranks, np.stack(parts))


def _by_code(codes: np.ndarray, slot_ranks: np.ndarray) -> np.ndarray:
    """Codes for all ranks that have one."""
    order = np.argsort(slot_ranks)
    at = order[np.minimum(np.searchsorted(slot_ranks, codes, sorter=order), len(order) - 1)] if len(order) else codes
    return np.where(slot_ranks[at] == codes, -(at + 1), codes) if len(order) else codes
