"""Deals members out to buckets, so that no rank stages more than the budget and every source sends in every bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_transport.layout.layout import ITEMSIZE

from .plan import PlanOptions, Slab
from .slabs import slab_rows
from .transfers import Link, TransferTable

SMALL = 64 << 10
"""Bytes of one rank in one slab that do not set ranks apart when buckets are filled."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What one member of a group makes each rank stage."""

    ranks: np.ndarray
    """int64, ascending."""
    nbytes: np.ndarray
    """int64, messages in plus out."""

    @property
    def peak(self) -> int:
        return int(self.nbytes.max(initial=0))


@dataclass(frozen=True, slots=True)
class Queue:
    """One entry per group: what decides the travel order of its members."""

    source: int
    """Groups of equal source layout wait in one line."""
    members: Sequence[int]
    """Indices of parameters."""
    nbytes: int
    """Of one member."""
    shape: tuple[int, ...]
    wire_dtype: str


def group_load(transfers: TransferTable, itemsize: int, world: int) -> GroupLoad:
    """``world`` is the highest rank plus one."""
    return _load(transfers, transfers.numel * itemsize, world)


def _load(transfers: TransferTable, nbytes: np.ndarray, world: int) -> GroupLoad:
    remote = transfers.link != Link.LOCAL
    weights = np.where(remote, nbytes, 0)
    total = np.bincount(transfers.src, weights, world) + np.bincount(transfers.dst, weights, world)
    ranks = np.flatnonzero(total)
    return GroupLoad(ranks, total[ranks].astype(np.int64))


def fill_buckets(
    groups: Sequence[Queue],
    tables: Sequence[TransferTable],
    loads: Sequence[GroupLoad],
    options: PlanOptions,
    world: int,
) -> tuple[tuple[tuple[Slab, ...], ...], list[int]]:
    """Buckets, and the ``slab_dim`` of every group.

    Members wait in one line per source layout, in travel order. Each has a position in [0, 1) in its line, by bytes;
    buckets take members by ascending position, so all lines advance together. Raises PlanError when a single row of a
    member does not fit.
    """
    slab_dims, cuts, slab_loads = [0] * len(groups), [], []
    for number, (group, table, load) in enumerate(zip(groups, tables, loads)):
        rows = group.shape[0] if group.shape else 1
        if load.peak <= options.bucket_bytes:
            cuts.append([(0, rows)])
            slab_loads.append([load])
            continue
        dim, parts = slab_rows(group.shape, ITEMSIZE[group.wire_dtype], table, options.bucket_bytes, world)
        slab_dims[number] = dim
        cuts.append(parts)
        slab_loads.append([_clipped_load(table, dim, part, ITEMSIZE[group.wire_dtype], world) for part in parts])
    order = _interleave(groups, [len(parts) for parts in cuts])
    return _pack(order, cuts, slab_loads, options.bucket_bytes, world), slab_dims


def _clipped_load(table: TransferTable, dim: int, part: tuple[int, int], itemsize: int, world: int) -> GroupLoad:
    rows = np.minimum(table.stop[:, dim], part[1]) - np.maximum(table.start[:, dim], part[0])
    full = table.stop[:, dim] - table.start[:, dim]
    return _load(table, table.numel // np.maximum(full, 1) * np.maximum(rows, 0) * itemsize, world)


def _interleave(groups: Sequence[Queue], slabs: Sequence[int]) -> np.ndarray:
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
    behind = np.cumsum(nbytes[line])
    new = np.flatnonzero(np.r_[True, np.diff(source[line]) != 0])
    lengths = np.diff(np.r_[new, len(line)])
    before = np.repeat(np.r_[0.0, behind][new], lengths)
    total = np.repeat(behind[np.r_[new[1:] - 1, len(line) - 1]] - np.r_[0.0, behind][new], lengths)
    end, width = (behind - before) / total, nbytes[line] / total
    count = np.array(slabs, np.int64)[group[line]]
    item = np.repeat(line, count)
    slab = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
    position = np.repeat(end - width, count) + (slab + 0.5) * np.repeat(width / count, count)
    order = np.lexsort((slab, group[item], parameter[item], np.round(position, 9)))
    return np.stack([group[item], member[item], slab], axis=1)[order]


def _pack(
    order: np.ndarray,
    cuts: Sequence[Sequence[tuple[int, int]]],
    loads: Sequence[Sequence[GroupLoad]],
    limit: int,
    world: int,
) -> tuple[tuple[Slab, ...], ...]:
    """Opens a new bucket whenever the next slab could take some rank over ``limit``."""
    alike = _alike(loads, world)
    costs = [[_cost_by_class(load, alike) for load in of_group] for of_group in loads]
    buckets: list[tuple[Slab, ...]] = []
    current: list[Slab] = []
    staged = np.zeros(int(alike.max(initial=0)) + 1, np.int64)
    for group, member, slab in order.tolist():
        ranks, nbytes = costs[group][slab]
        after = staged[ranks] + nbytes
        if current and len(after) and after.max() > limit:
            buckets.append(tuple(current))
            current = []
            staged[:] = 0
            after = nbytes
        staged[ranks] = after
        current.append(Slab(group, member, *cuts[group][slab]))
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def _alike(loads: Sequence[Sequence[GroupLoad]], world: int) -> np.ndarray:
    """int64 [world]: the class of each rank. Ranks of one class stage nearly the same in every slab, so the busiest of
    them stands for all; there are far fewer classes than ranks."""
    mark = np.zeros(world, np.uint64)
    number = 1
    for of_group in loads:
        for load in of_group:
            much = load.nbytes >= SMALL
            level = (4 * np.log2(load.nbytes[much])).astype(np.uint64)
            mark[load.ranks[much]] += level * np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)
            number += 1
    return np.unique(mark, return_inverse=True)[1]


def _cost_by_class(load: GroupLoad, alike: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes, and the most bytes that one rank of each stages."""
    classes = alike[load.ranks]
    order = np.argsort(classes, kind="stable")
    classes = classes[order]
    first = np.flatnonzero(np.r_[True, classes[1:] != classes[:-1]][: len(classes)])
    most = np.maximum.reduceat(load.nbytes[order], first) if len(first) else load.nbytes
    return classes[first], most
