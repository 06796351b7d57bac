"""Deals members out to buckets, so that no rank stages more than the budget and every source sends in every bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .demand import decode
from .loads import TemplateLoad
from .plan import Slab

SMALL = 1 / 4096
"""Part of a bucket: slabs that make a rank stage less do not set ranks apart when buckets are filled."""


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """What decides when the members of a group travel."""

    source: int
    """Groups of equal source layout wait in one line."""
    members: Sequence[int]
    """Indices of parameters."""
    nbytes: int
    """Of one member."""
    load: TemplateLoad
    slot_ranks: np.ndarray

    @property
    def ranks(self) -> np.ndarray:
        """int64: the joint ranks of ``load.ranks``."""
        return decode(self.load.ranks, self.slot_ranks)


def fill_buckets(groups: Sequence[Queued], limit: int, world: int) -> tuple[tuple[Slab, ...], ...]:
    """Buckets in which no rank stages more than ``limit`` bytes.

    Members wait in one line per source layout, in travel order. Each has a position in [0, 1) in its line, by bytes;
    buckets take members by ascending position, so all lines advance together. ``world`` is the highest rank plus one.
    """
    ranks = [group.ranks for group in groups]
    alike = _alike(groups, ranks, world, SMALL * limit)
    costs = [_costs_by_class(group.load.nbytes, alike[of]) for group, of in zip(groups, ranks)]
    buckets: list[tuple[Slab, ...]] = []
    staged = [0] * (int(alike.max(initial=0)) + 1)
    order = _interleave(groups)
    first = 0
    for position, (group, _, slab) in enumerate(order.tolist()):
        cost = costs[group][slab]
        for of, nbytes in cost:
            if staged[of] + nbytes > limit:
                buckets.append(_slabs(groups, order[first:position]))
                first = position
                staged = [0] * len(staged)
                break
        for of, nbytes in cost:
            staged[of] += nbytes
    if first < len(order):
        buckets.append(_slabs(groups, order[first:]))
    return tuple(buckets)


def _slabs(groups: Sequence[Queued], order: np.ndarray) -> tuple[Slab, ...]:
    return tuple(Slab(group, member, *groups[group].load.slabs[slab]) for group, member, slab in order.tolist())


def _interleave(groups: Sequence[Queued]) -> np.ndarray:
    """int64 [slabs in all, 3]: (group, member, slab) in travel order."""
    sizes = np.array([len(group.members) for group in groups], np.int64)
    group = np.repeat(np.arange(len(groups)), sizes)
    if not len(group):
        return np.zeros((0, 3), np.int64)
    member = np.concatenate([np.arange(size) for size in sizes])
    parameter = np.concatenate([np.asarray(g.members, np.int64) for g in groups])
    source = np.array([g.source for g in groups], np.int64)[group]
    nbytes = np.array([max(g.nbytes, 1) for g in groups], float)[group]
    line = np.lexsort((group, parameter, source))
    behind = np.r_[0.0, np.cumsum(nbytes[line])]
    first = np.flatnonzero(np.r_[True, np.diff(source[line]) != 0])
    last = np.r_[first[1:], len(line)]
    before = np.repeat(behind[first], last - first)
    total = np.repeat(behind[last] - behind[first], last - first)
    start, width = (behind[:-1] - before) / total, nbytes[line] / total
    count = np.array([len(g.load.slabs) for g in groups], np.int64)[group[line]]
    item = np.repeat(line, count)
    slab = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
    position = np.repeat(start, count) + (slab + 0.5) * np.repeat(width / count, count)
    order = np.lexsort((slab, group[item], parameter[item], np.round(position, 9)))
    return np.stack([group[item], member[item], slab], axis=1)[order]


def _alike(groups: Sequence[Queued], ranks: Sequence[np.ndarray], world: int, small: float) -> np.ndarray:
    """int64 [world]: the class of each rank. Ranks of one class stage nearly the same in every slab, so the busiest of
    them stands for all; there are far fewer classes than ranks."""
    mark = np.zeros(world, np.uint64)
    levels: dict[int, np.ndarray] = {}
    for number, (group, of) in enumerate(zip(groups, ranks)):
        if id(group.load) not in levels:
            much = group.load.nbytes >= small
            level = np.where(much, 4 * np.log2(np.maximum(group.load.nbytes, 1)), 0).astype(np.uint64)
            weight = np.arange(1, len(level) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            levels[id(group.load)] = (level * weight[:, None]).sum(axis=0, dtype=np.uint64)
        mark[of] += levels[id(group.load)] * np.uint64(2 * number + 1)
    return np.unique(mark, return_inverse=True)[1]


def _costs_by_class(nbytes: np.ndarray, classes: np.ndarray) -> list[list[tuple[int, int]]]:
    """By slab: (class, most bytes that one of its ranks stages)."""
    if not len(classes):
        return [[] for _ in nbytes]
    order = np.argsort(classes, kind="stable")
    ordered = classes[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    most = np.maximum.reduceat(nbytes[:, order], first, axis=1)
    named = ordered[first].tolist()
    return [[pair for pair in zip(named, row) if pair[1]] for row in most.tolist()]
