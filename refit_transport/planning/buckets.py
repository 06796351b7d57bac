"""Deals members out to buckets, so that no rank stages more than the budget and every source sends in every bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .demand import decode
from .loads import TemplateLoad
from .plan import Slab

SMALL = 1 / 4096
"""Part of a bucket: slabs that make a rank stage less do not set ranks apart when buckets are filled."""


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """What decides when the members of a group travel."""

    line: Hashable
    """Groups of one line wait for each other."""
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

    Members of a line are in travel order, but large ones are spread over it, so that few of them are under way at once.
    Each member has a position in [0, 1) in its line, by bytes; buckets take members by ascending position, so all lines
    advance together. ``world`` is the highest rank plus one.
    """
    ranks = [group.ranks for group in groups]
    alike = _alike(groups, ranks, world, SMALL * limit)
    costs = _costs(groups, [alike[of] for of in ranks])
    order = _interleave(groups)
    first_slab = np.cumsum([0] + [len(group.load.slabs) for group in groups])
    number = first_slab[order[:, 0]] + order[:, 2]
    slabs = _slabs(groups, order, number)
    buckets: list[tuple[Slab, ...]] = []
    filling = _Filling(limit, int(alike.max(initial=0)) + 1)
    first = 0
    for position, cost in enumerate(map(costs.__getitem__, number.tolist())):
        if not filling.take(cost):
            buckets.append(tuple(slabs[first:position]))
            filling = _Filling(limit, len(filling.staged))
            filling.take(cost)
            first = position
    if first < len(order):
        buckets.append(tuple(slabs[first:]))
    return tuple(buckets)


def _slabs(groups: Sequence[Queued], order: np.ndarray, number: np.ndarray) -> list[Slab]:
    """``number``: by item of ``order``, its slab's place among those of all groups."""
    rows = np.array([slab for group in groups for slab in group.load.slabs], np.int64).reshape(-1, 2)[number]
    columns = order[:, 0], order[:, 1], rows[:, 0], rows[:, 1]
    # Models have a million of them; calling the class takes half as long again.
    return list(map(partial(tuple.__new__, Slab), zip(*(column.tolist() for column in columns))))


def _interleave(groups: Sequence[Queued]) -> np.ndarray:
    """int64 [slabs in all, 3]: (group, member, slab) in travel order."""
    sizes = np.array([len(group.members) for group in groups], np.int64)
    group = np.repeat(np.arange(len(groups)), sizes)
    if not len(group):
        return np.zeros((0, 3), np.int64)
    member = np.concatenate([np.arange(size) for size in sizes])
    parameter = np.concatenate([np.asarray(g.members, np.int64) for g in groups])
    lines = {line: number for number, line in enumerate(dict.fromkeys(g.line for g in groups))}
    waiting = np.array([lines[g.line] for g in groups], np.int64)[group]
    nbytes = np.array([max(g.nbytes, 1) for g in groups], float)[group]
    line = np.lexsort((group, parameter, _spread(waiting, nbytes, parameter, group), waiting))
    behind = np.r_[0.0, np.cumsum(nbytes[line])]
    first = np.flatnonzero(np.r_[True, np.diff(waiting[line]) != 0])
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


def _spread(line: np.ndarray, nbytes: np.ndarray, parameter: np.ndarray, group: np.ndarray) -> np.ndarray:
    """float64 [members]: the place of each in its line. Members of about one size (the same power of two) are in travel
    order and evenly spread over those of other sizes."""
    size = np.log2(nbytes).astype(np.int64)
    order = np.lexsort((group, parameter, size, line))
    first = np.flatnonzero(np.r_[True, (np.diff(line[order]) != 0) | (np.diff(size[order]) != 0)])
    count = np.diff(np.r_[first, len(order)])
    place = np.empty(len(order))
    place[order] = (np.arange(len(order)) - np.repeat(first, count) + 0.5) / np.repeat(count, count)
    return place


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


@dataclass(frozen=True, slots=True, eq=False)
class _Cost:
    """What a slab makes each class of ranks stage (the most that one of its ranks does)."""

    few: list[tuple[int, int]]
    """(class, bytes) of classes that few groups concern: the senders."""
    many: np.ndarray
    """int64: bytes by class that many groups concern: the receivers."""
    most: int
    """Of ``many``."""


def _costs(groups: Sequence[Queued], classes: Sequence[np.ndarray]) -> list[_Cost]:
    """By group and slab, one after the other."""
    of_group = [_costs_by_class(group.load.nbytes, of) for group, of in zip(groups, classes)]
    seen = Counter(int(of) for named, _ in of_group for of in named)
    common = np.array(sorted(of for of, times in seen.items() if 4 * times > len(groups)), np.int64)
    costs = []
    for named, most in of_group:
        shared = np.isin(named, common)
        many = np.zeros((len(most), len(common)), np.int64)
        many[:, np.searchsorted(common, named[shared])] = most[:, shared]
        own = named[~shared].tolist()
        few = [[pair for pair in zip(own, row) if pair[1]] for row in most[:, ~shared].tolist()]
        costs += [_Cost(f, m, int(m.max(initial=0))) for f, m in zip(few, many)]
    return costs


def _costs_by_class(nbytes: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes, and int64 [slabs, classes] the most bytes that one rank of each stages."""
    if not len(classes):
        return classes, nbytes
    order = np.argsort(classes, kind="stable")
    ordered = classes[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    return ordered[first], np.maximum.reduceat(nbytes[:, order], first, axis=1)


class _Filling:
    """A bucket that is being filled. Bytes of common classes are added up only when the bound on them is reached."""

    def __init__(self, limit: int, classes: int) -> None:
        self.limit = limit
        self.staged = [0] * classes
        self.common: np.ndarray | int = 0
        self.pending: list[np.ndarray] = []
        self.bound = 0
        """At least what any common class stages."""

    def take(self, cost: _Cost) -> bool:
        """Add a slab, unless there is no room for it."""
        staged, limit = self.staged, self.limit
        for of, nbytes in cost.few:
            if staged[of] + nbytes > limit:
                return False
        if self.bound + cost.most > limit:
            if self.pending:
                self.common = self.common + np.sum(self.pending, axis=0)
                self.pending = []
                self.bound = int(self.common.max())
            if int((self.common + cost.many).max(initial=0)) > limit:
                return False
        for of, nbytes in cost.few:
            staged[of] += nbytes
        self.pending.append(cost.many)
        self.bound += cost.most
        return True
