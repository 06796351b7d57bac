"""The slabs of a plan as columns, by group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from .plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class SlabTable:
    """One row per slab, in travel order."""

    bucket: np.ndarray
    """int64."""
    parameter: np.ndarray
    """int64, index into ``Plan.parameters``."""
    start: np.ndarray
    stop: np.ndarray
    by_group: np.ndarray
    """int64: row numbers, sorted by group and then ascending."""
    first: np.ndarray
    """int64 [groups + 1]: where each group begins in ``by_group``."""

    @classmethod
    def of(cls, plan: Plan) -> SlabTable:
        slabs = chain.from_iterable(chain.from_iterable(plan.buckets))  # a slab is a tuple of four numbers
        group, member, start, stop = np.fromiter(slabs, np.int64).reshape(-1, 4).T
        bucket = np.repeat(np.arange(len(plan.buckets)), [len(bucket) for bucket in plan.buckets])
        offset = np.cumsum([0] + [len(g.members) for g in plan.groups])
        members = np.array([parameter for g in plan.groups for parameter in g.members], np.int64)
        by_group = np.argsort(group, kind="stable")
        first = np.searchsorted(group[by_group], np.arange(len(plan.groups) + 1))
        return cls(bucket, members[offset[group] + member], start, stop, by_group, first)

    def of_group(self, group: int) -> np.ndarray:
        """Rows of a group's slabs, in travel order."""
        return self.by_group[self.first[group] : self.first[group + 1]]
