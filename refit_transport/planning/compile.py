"""Compiles a plan into one rank's program: finds its pieces, orders them and lays them out in messages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np

from refit_transport.layout.layout import ITEMSIZE

from .plan import Plan
from .program import BucketProgram, Message, PieceTable, Program
from .slab_table import SlabTable
from .transfers import Link, TransferTable

SEND, RECV, LOCAL = range(3)
LINKS = tuple(Link)


def compile_program(plan: Plan, rank: int) -> Program:
    """Everything that ``rank`` does in a refit; a rank without a part gets empty buckets.

    Sender and receiver of a message order its pieces alike without talking: by falling item size, then by the ranks
    that the receiver forwards them to and by the message they were received in (so that what goes on to one peer lies
    together), then in plan order.
    """
    slabs = SlabTable.of(plan)
    columns = _collect(plan, rank, slabs)
    if len(columns.bucket):
        columns = columns.take(columns.order())
    pieces, messages = _lay_out(columns)
    whole = _whole(plan, rank, slabs)
    buckets = []
    for bucket in range(len(plan.buckets)):
        sends, recvs, local = messages[bucket] if bucket in messages else ((), (), (0, 0))
        buckets.append(BucketProgram(_rotate(sends, rank + bucket), tuple(recvs), local, tuple(whole.get(bucket, ()))))
    return Program(rank, pieces, tuple(buckets), plan.digest)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """One row per piece of this rank."""

    bucket: np.ndarray
    kind: np.ndarray
    hop: np.ndarray
    peer: np.ndarray
    link: np.ndarray
    place: np.ndarray
    """Orders the pieces of a message before their slabs do."""
    slab: np.ndarray
    row: np.ndarray
    """Row in the group's transfers."""
    parent: np.ndarray
    parameter: np.ndarray
    group: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    nbytes: np.ndarray
    wanted: np.ndarray

    def order(self) -> np.ndarray:
        hops, peers = int(self.hop.max()) + 1, int(self.peer.max()) + 1
        message = ((self.bucket * 3 + self.kind) * hops + self.hop) * peers + self.peer
        return np.lexsort((self.slab * (int(self.row.max()) + 1) + self.row, self.place, message))

    def take(self, order: np.ndarray) -> _Columns:
        return _Columns(*(getattr(self, name)[order] for name in self.__slots__))


def _collect(plan: Plan, rank: int, slabs: SlabTable) -> _Columns:
    ndim = max((len(group.shape) for group in plan.groups), default=0)
    parts = []
    for number, group in enumerate(plan.groups):
        table = group.transfers
        rows = np.flatnonzero((table.src == rank) | (table.dst == rank))
        if len(rows):
            parts.append((number, rows, _lineage(table, rows)))
    places = _places(plan, parts)
    chunks = [_expand(plan, number, rows, place, rank, slabs, ndim) for (number, rows, _), place in zip(parts, places)]
    if not chunks:
        none = np.zeros(0, np.int64)
        empty = {name: none for name in _Columns.__slots__}
        box = np.zeros((0, ndim), np.int64)
        return _Columns(**{**empty, "start": box, "stop": box})
    return _Columns(*(np.concatenate(column) for column in zip(*chunks)))


def _lineage(table: TransferTable, rows: np.ndarray) -> np.ndarray:
    """int64 [rows, levels]: the fan of each transfer, then source and fan of the transfer that it forwards, of the one
    before that, ...; -1 where there is none."""
    columns = [table.fan[rows]]
    parent = table.parent[rows]
    while (parent >= 0).any():
        known = parent >= 0
        columns.append(np.where(known, table.src[parent], -1))
        columns.append(np.where(known, table.fan[parent], -1))
        parent = np.where(known, table.parent[parent], -1)
    return np.stack(columns, axis=1).astype(np.int64)


def _places(plan: Plan, parts: list[tuple[int, np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """By part, int64 [rows]: the place of each transfer by falling item size and then by lineage; equal ones share it.
    Any two ranks that compare the same transfers find the same order."""
    if not parts:
        return []
    levels = max(lineage.shape[1] for _, _, lineage in parts)
    table = np.full((sum(len(rows) for _, rows, _ in parts), levels + 1), -1, np.int64)
    ends = np.cumsum([len(rows) for _, rows, _ in parts])
    for (number, _, lineage), end in zip(parts, ends.tolist()):
        mine = slice(end - len(lineage), end)
        table[mine, 0] = -ITEMSIZE[plan.groups[number].wire_dtype]
        table[mine, 1 : 1 + lineage.shape[1]] = lineage
    order = np.lexsort(table.T[::-1])
    new = (table[order][1:] != table[order][:-1]).any(axis=1)
    place = np.empty(len(table), np.int64)
    place[order] = np.r_[0, np.cumsum(new)]
    return np.split(place, ends[:-1])


def _expand(
    plan: Plan,
    number: int,
    rows: np.ndarray,
    place: np.ndarray,
    rank: int,
    slabs: SlabTable,
    ndim: int,
) -> tuple[np.ndarray, ...]:
    """Every transfer of ``rows`` for every slab of the group, without the empty ones; columns as in ``_Columns``."""
    group = plan.groups[number]
    table, dim = group.transfers, group.slab_dim
    slab = slabs.of_group(number)
    start = np.repeat(_padded(table.start[rows], ndim, 0), len(slab), axis=0)
    stop = np.repeat(_padded(table.stop[rows], ndim, 1), len(slab), axis=0)
    at = np.tile(slab, len(rows))
    row = np.repeat(rows, len(slab))
    if group.shape:
        start[:, dim] = np.maximum(start[:, dim], slabs.start[at])
        stop[:, dim] = np.minimum(stop[:, dim], slabs.stop[at])
        keep = np.flatnonzero(start[:, dim] < stop[:, dim])
    else:
        keep = np.arange(len(row))
    start, stop, at, row = start[keep], stop[keep], at[keep], row[keep]
    src, dst = table.src[row], table.dst[row]
    link = table.link[row]
    sends = (src == rank) & (link != Link.LOCAL)
    itemsize = ITEMSIZE[group.wire_dtype]
    return (
        slabs.bucket[at],
        np.where(link == Link.LOCAL, LOCAL, np.where(sends, SEND, RECV)),
        table.hop[row].astype(np.int64),
        np.where(sends, dst, src).astype(np.int64),
        link.astype(np.int64),
        np.repeat(place, len(slab))[keep],
        at,
        row,
        table.parent[row].astype(np.int64),
        slabs.parameter[at],
        np.full(len(at), number),
        start,
        stop,
        np.prod(stop - start, axis=1) * itemsize,
        table.wanted[row],
    )


def _padded(corner: np.ndarray, ndim: int, value: int) -> np.ndarray:
    missing = ndim - corner.shape[1]
    return np.pad(corner, ((0, 0), (0, missing)), constant_values=value) if missing else corner


_Messages = tuple[list[Message], list[Message], tuple[int, int]]


def _lay_out(columns: _Columns) -> tuple[PieceTable, dict[int, _Messages]]:
    """The piece table, and per bucket its sends, receives and local rows. ``columns`` are sorted."""
    rows = len(columns.bucket)
    head = np.stack([columns.bucket, columns.kind, columns.hop, columns.peer], axis=1)
    edges = np.flatnonzero(np.r_[rows > 0, (head[1:] != head[:-1]).any(axis=1)])
    ends = np.r_[edges[1:], rows]
    behind = np.r_[0, np.cumsum(columns.nbytes)].astype(np.int64)
    offset = behind[:-1] - np.repeat(behind[edges], ends - edges)
    kind, bucket = columns.kind[edges], columns.bucket[edges]
    fields = (columns.peer, columns.hop, columns.link)
    values = [column[edges].tolist() for column in fields] + [(behind[ends] - behind[edges]).tolist()]
    peers, hops, links, sizes = values
    rows_of = zip(peers, hops, map(LINKS.__getitem__, links), sizes, edges.tolist(), ends.tolist())
    every = list(map(partial(tuple.__new__, Message), rows_of))  # calling the class takes half as long again
    messages: dict[int, _Messages] = defaultdict(lambda: ([], [], (0, 0)))
    new = np.flatnonzero(np.r_[len(edges) > 0, (np.diff(bucket) != 0) | (np.diff(kind) != 0)])
    for first, last in zip(new.tolist(), [*new[1:].tolist(), len(edges)]):
        sends, recvs, local = messages[int(bucket[first])]
        if kind[first] == SEND:
            sends = every[first:last]
        elif kind[first] == RECV:
            recvs = every[first:last]
        else:
            local = every[first].first, every[last - 1].last
        messages[int(bucket[first])] = sends, recvs, local
    table = PieceTable(
        parameter=columns.parameter.astype(np.int32),
        group=columns.group.astype(np.int32),
        start=columns.start,
        stop=columns.stop,
        offset=np.where(columns.kind == LOCAL, 0, offset),
        nbytes=columns.nbytes.astype(np.int64),
        origin=_origins(columns),
        wanted=columns.wanted.astype(bool),
    )
    return table, dict(messages)


def _origins(columns: _Columns) -> np.ndarray:
    """int64 [rows]: where the piece that a row forwards was received, -1 for the rank's own data."""
    origin = np.full(len(columns.bucket), -1, np.int64)
    forwards = np.flatnonzero((columns.kind == SEND) & (columns.parent >= 0))
    if not len(forwards):
        return origin
    received = np.flatnonzero(columns.kind == RECV)
    span = int(max(columns.row.max(), columns.parent.max())) + 1
    key = columns.slab[received] * span + columns.row[received]
    order = np.argsort(key)
    wanted = columns.slab[forwards] * span + columns.parent[forwards]
    origin[forwards] = received[order][np.searchsorted(key[order], wanted)]
    return origin


def _rotate(sends: list[Message] | tuple[()], turn: int) -> tuple[Message, ...]:
    """Each hop's messages start at another peer on every rank and in every bucket."""
    by_hop: dict[int, list[Message]] = defaultdict(list)
    for message in sends:
        by_hop[message.hop].append(message)
    ordered: list[Message] = []
    for hop in sorted(by_hop):
        messages = by_hop[hop]
        first = turn % len(messages)
        ordered += messages[first:] + messages[:first]
    return tuple(ordered)


def _whole(plan: Plan, rank: int, slabs: SlabTable) -> dict[int, list[tuple[int, int]]]:
    """By bucket: (parameter, bytes) of the whole tensors of this rank that are complete after it."""
    complete: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, group in enumerate(plan.groups):
        if not group.whole or rank not in group.targets:
            continue
        nbytes = int(np.prod(group.shape, dtype=np.int64)) * ITEMSIZE[group.dst_dtype]
        slab = slabs.of_group(number)
        last = dict(zip(slabs.parameter[slab].tolist(), slabs.bucket[slab].tolist()))  # slabs ascend by bucket
        for parameter, bucket in last.items():
            complete[bucket].append((parameter, nbytes))
    return {bucket: sorted(found) for bucket, found in complete.items()}
