"""Adds up what a plan moves: bytes and messages per bucket and rank, by link and hop, members never one by one.

All members of a group travel alike, so a group is summed once per distinct range of rows and weighed by how often a
bucket holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from refit_transport.layout.layout import ITEMSIZE

from .plan import Link, Plan, Route, TransferGroup

LAST_HOP = 3
"""Hops beyond this are summed with it: the hops of a broadcast ring flow at once."""
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over a plan. ``R`` is the highest joint rank plus one, ``D`` the number of buckets that differ: a plan of
    thousands of buckets repeats a few. Bytes are float32: exact to 16 in 256 MiB, and half the memory."""

    kind: np.ndarray
    """int64 [buckets]: which of the ``D`` distinct buckets each bucket is."""
    send: dict[tuple[Link, int], np.ndarray]
    """By link and hop: bytes sent, [D, R]."""
    recv: dict[tuple[Link, int], np.ndarray]
    """By link and hop: bytes received, [D, R]."""
    packed: np.ndarray
    """Bytes that leave their owner and are packed for it, [D, R]."""
    unpacked: np.ndarray
    """Bytes stored at their destination, in its dtype, local copies included, [D, R]."""
    whole: np.ndarray
    """Bytes of whole tensors handed to the model's loader, [D, R]."""
    whole_tensors: np.ndarray
    """Number of those tensors (a share counts as its share), [D, R]."""
    messages_out: np.ndarray
    """Messages sent, [D, R]; all pieces for one peer in one bucket and hop are one message."""
    messages_in: np.ndarray
    """[D, R]."""
    largest_whole: int
    """Bytes of the largest whole tensor."""
    by_route: dict[tuple[Route, Link], float]
    """Bytes by path and link."""
    tensors_by_route: dict[Route, int]
    pairs: dict[Link, np.ndarray] = field(default_factory=dict)
    """Bytes from block of ranks to block of ranks, [blocks, blocks], by link."""
    block_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Block of each rank, [R]."""

    @property
    def times(self) -> np.ndarray:
        """How often each distinct bucket occurs, float64 [D]."""
        return np.bincount(self.kind, minlength=len(self.packed)).astype(np.float64)

    def total(self, table: np.ndarray) -> np.ndarray:
        """``table`` [D, columns] summed over all buckets, [columns]."""
        return self.times @ table

    @property
    def staged(self) -> np.ndarray:
        """Bytes staged on each rank by each distinct bucket, in plus out, [D, R]."""
        received = (table for (link, _), table in self.recv.items() if link is not Link.LOCAL)
        return self.packed + sum(received, np.zeros_like(self.packed))

    def of_link(self, link: Link) -> tuple[np.ndarray, np.ndarray]:
        """Bytes sent and received over ``link``, all hops together, each [D, R]."""
        zero = np.zeros_like(self.packed)
        return (sum((table for (of, _), table in self.send.items() if of is link), zero),
                sum((table for (of, _), table in self.recv.items() if of is link), zero))  # fmt: skip


@dataclass(slots=True)
class _Rows:
    """Transfers of a group, clipped to one range of rows: what one slab moves."""

    group: TransferGroup
    share: float
    """Of a member's rows."""
    src: np.ndarray
    dst: np.ndarray
    step: np.ndarray
    """link * (LAST_HOP + 1) + hop."""
    wire: np.ndarray
    """Bytes in the wire dtype."""
    stored: np.ndarray
    """Bytes in the destination dtype of what the destination keeps."""
    owned: np.ndarray
    """bool: the source owns the bytes and packs them."""


def measure(plan: Plan, blocks: int = 128) -> Traffic:
    """Sum up ``plan``. The pair tables have at most ``blocks`` blocks of equal numbers of consecutive ranks."""
    ranks = max((rank for domain in plan.domains for rank in domain), default=-1) + 1
    keys, counts, inverse = _count_slabs(plan)
    rows = [_clip(plan.groups[group], start, stop) for group, start, stop in keys]
    sums = _Sums(ranks, len(counts), counts, inverse, -(-ranks // blocks) if ranks > blocks else 1)
    for first in range(0, len(rows), _CHUNK):
        sums.add(rows[first : first + _CHUNK], first)
    out, into = _messages(rows, counts, ranks)
    whole = [group for group in plan.groups if group.whole]
    return Traffic(
        kind=inverse, send=_by_link_and_hop(sums.send), recv=_by_link_and_hop(sums.recv), packed=sums.packed,
        unpacked=sums.unpacked, whole=sums.whole, whole_tensors=sums.whole_tensors, messages_out=out, messages_in=into,
        largest_whole=max((prod(g.shape) * ITEMSIZE[g.wire_dtype] for g in whole), default=0),
        by_route=sums.by_route, tensors_by_route=_tensors_by_route(plan.groups), pairs=sums.pairs,
        block_of=sums.block_of,
    )  # fmt: skip


def _by_link_and_hop(tables: dict[int, np.ndarray]) -> dict[tuple[Link, int], np.ndarray]:
    split = LAST_HOP + 1
    return {(Link(step // split), step % split): table for step, table in tables.items()}


def _count_slabs(plan: Plan) -> tuple[list[tuple[int, int, int]], np.ndarray, np.ndarray]:
    """Distinct (group, start, stop); how often each distinct bucket holds each, [distinct buckets, keys]; and the
    distinct bucket of each bucket, [B]."""
    numbers: dict[tuple[int, int, int], int] = {}
    counted: dict[tuple[tuple[int, int], ...], int] = {}
    inverse = np.zeros(len(plan.buckets), np.int64)
    for bucket_number, bucket in enumerate(plan.buckets):
        held: dict[int, int] = {}
        for slab in bucket:
            key = numbers.setdefault((slab.group, slab.start, slab.stop), len(numbers))
            held[key] = held.get(key, 0) + 1
        inverse[bucket_number] = counted.setdefault(tuple(sorted(held.items())), len(counted))
    counts = np.zeros((len(counted), len(numbers)), np.float32)
    for row, held_items in enumerate(counted):
        for key, count in held_items:
            counts[row, key] = count
    return list(numbers), counts, inverse


def _clip(group: TransferGroup, start: int, stop: int) -> _Rows:
    table = group.transfers
    numel = table.numel.astype(np.float64)
    rows = group.shape[group.slab_dim] if group.shape else 1
    if group.shape and (start > 0 or stop < rows):
        low, high = table.start[:, group.slab_dim], table.stop[:, group.slab_dim]
        overlap = np.clip(np.minimum(high, stop) - np.maximum(low, start), 0, None)
        numel = numel * overlap / np.maximum(high - low, 1)
    live = np.flatnonzero(numel)
    hop = np.minimum(table.hop[live], LAST_HOP).astype(np.int64)
    link = table.link[live].astype(np.int64)
    return _Rows(
        group, (stop - start) / max(rows, 1), table.src[live].astype(np.int64), table.dst[live].astype(np.int64),
        link * (LAST_HOP + 1) + hop, numel[live] * ITEMSIZE[group.wire_dtype],
        np.where(table.wanted[live], numel[live], 0.0) * ITEMSIZE[group.dst_dtype], table.parent[live] < 0,
    )  # fmt: skip


_Pick = Callable[[_Rows], tuple[np.ndarray, np.ndarray]]


class _Sums:
    """Accumulators over chunks of keys: [distinct buckets, R] tables and the totals of the whole plan."""

    def __init__(self, ranks: int, buckets: int, counts: np.ndarray, inverse: np.ndarray, block: int) -> None:
        self.ranks, self.counts = ranks, counts
        self.totals = np.bincount(inverse, minlength=buckets).astype(np.float64) @ counts
        self.send: dict[int, np.ndarray] = {}
        self.recv: dict[int, np.ndarray] = {}
        self.packed, self.unpacked, self.whole, self.whole_tensors = (
            np.zeros((buckets, ranks), np.float32) for _ in range(4)
        )
        self.by_route: dict[tuple[Route, Link], float] = {}
        self.block_of = np.arange(ranks) // block
        size = int(self.block_of[-1]) + 1 if ranks else 0
        self.pairs = {link: np.zeros((size, size)) for link in Link}

    def add(self, rows: Sequence[_Rows], first: int) -> None:
        weights = self.counts[:, first : first + len(rows)]
        self._steps(rows, weights)
        self.packed += weights @ self._by_rank(rows, lambda r: (r.src, np.where(r.owned & (r.src != r.dst), r.wire, 0)))
        self.unpacked += weights @ self._by_rank(rows, lambda r: (r.dst, r.stored))
        whole = [row if row.group.whole else None for row in rows]
        if any(whole):
            nbytes = self._by_rank(whole, lambda r: (r.dst, r.stored))
            self.whole += weights @ nbytes
            self.whole_tensors += weights @ np.stack(
                [(nbytes[i] > 0) * np.float32(row.share if row else 0) for i, row in enumerate(whole)]
            )
        for row, count in zip(rows, self.totals[first : first + len(rows)], strict=True):
            self._totals(row, count)

    def _steps(self, rows: Sequence[_Rows], weights: np.ndarray) -> None:
        for step in sorted({int(step) for row in rows for step in np.unique(row.step)}):
            out = self._by_rank(rows, lambda r: (r.src, np.where(r.step == step, r.wire, 0)))  # noqa: B023
            into = self._by_rank(rows, lambda r: (r.dst, np.where(r.step == step, r.wire, 0)))  # noqa: B023
            for tables, moved in ((self.send, out), (self.recv, into)):
                if step not in tables:
                    tables[step] = np.zeros_like(self.packed)
                tables[step] += weights @ moved

    def _by_rank(self, rows: Sequence[_Rows | None], pick: _Pick) -> np.ndarray:
        """[rows, R]: the values of ``pick(row) = (ranks, values)`` summed by rank."""
        table = np.zeros((len(rows), self.ranks), np.float32)
        for i, row in enumerate(rows):
            if row is not None and len(row.src):
                ranks, values = pick(row)
                table[i] = np.bincount(ranks, weights=values, minlength=self.ranks)
        return table

    def _totals(self, row: _Rows, count: float) -> None:
        for link in Link:
            mine = row.step // (LAST_HOP + 1) == link
            if not mine.any():
                continue
            wire = row.wire[mine] * count
            key = (row.group.route, link)
            self.by_route[key] = self.by_route.get(key, 0.0) + float(wire.sum())
            size = len(self.pairs[link])
            cells = self.block_of[row.src[mine]] * size + self.block_of[row.dst[mine]]
            self.pairs[link] += np.bincount(cells, weights=wire, minlength=size * size).reshape(size, size)


def _messages(rows: Sequence[_Rows], counts: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Messages out of and into each rank in each distinct bucket, [distinct buckets, R]."""
    number_of: dict[bytes, int] = {}
    sets: list[np.ndarray] = []
    of_row = np.zeros(len(rows), np.int64)
    for i, row in enumerate(rows):
        remote = row.src != row.dst
        pairs = np.unique((row.step[remote] % (LAST_HOP + 1) * ranks + row.src[remote]) * ranks + row.dst[remote])
        of_row[i] = number_of.setdefault(pairs.tobytes(), len(sets))
        if of_row[i] == len(sets):
            sets.append(pairs)
    out, into = (np.zeros((len(counts), ranks), np.int32) for _ in range(2))
    seen: dict[bytes, int] = {}
    mark = np.zeros((LAST_HOP + 1) * ranks * ranks, bool)
    for bucket, held in enumerate(counts):
        present = np.unique(of_row[np.flatnonzero(held)])
        same = seen.setdefault(present.tobytes(), bucket)
        if same != bucket:
            out[bucket], into[bucket] = out[same], into[same]
            continue
        new = []
        for number in present:
            new.append(sets[number][~mark[sets[number]]])
            mark[new[-1]] = True
        pairs = np.concatenate(new) if new else np.zeros(0, np.int64)
        out[bucket] = np.bincount(pairs // ranks % ranks, minlength=ranks)
        into[bucket] = np.bincount(pairs % ranks, minlength=ranks)
        mark[pairs] = False
    return out, into


def _tensors_by_route(groups: Sequence[TransferGroup]) -> dict[Route, int]:
    found: dict[Route, int] = {}
    for group in groups:
        found[group.route] = found.get(group.route, 0) + len(group.members)
    return found
