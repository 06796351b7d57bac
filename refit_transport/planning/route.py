"""Routes a demand: turns atoms into transfers that cross into each domain once and spread out inside it.

The result is a template in slot codes, shared by all groups whose demand and shares are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .demand import Demand
from .stripes import RowAxis, Segments, owners_at, row_axis, segment, stripe_boxes, unite

Fractions = dict[int, np.ndarray]
"""By number of a set of several ranks: the fraction of the set's bytes that each rank takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """How the bytes of sets of several ranks are shared out; sets of one rank are not listed."""

    senders: Fractions
    """By holder set of the demand."""
    receivers: Fractions
    """By receiver set of the demand."""
    near: Fractions
    """By position in the demand's ``near``."""

    def key(self) -> tuple[object, ...]:
        """Hashable form."""
        tables = (self.senders, self.receivers, self.near)
        return tuple((number, share.tobytes()) for table in tables for number, share in (*table.items(), (-1, _NONE)))

    def parts(self, demand: Demand) -> np.ndarray:
        """int64 [atoms]: into how many runs an atom may be cut."""
        sending = np.ones(len(demand.holders), np.int64)
        for index, share in self.senders.items():
            sending[index] = np.count_nonzero(share)
        receiving = np.ones(len(demand.receivers) + 1, np.int64)  # the last one is for -1
        for index, share in self.receivers.items():
            receiving[index] = np.count_nonzero(share)
        parts = np.maximum(sending[demand.atoms.holders], receiving[demand.far].max(axis=1, initial=1))
        for position, share in self.near.items():
            atoms = demand.near[position][2]
            parts[atoms] = np.maximum(parts[atoms], np.count_nonzero(share))
        return parts


_NONE = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Transfers with codes for source slots; columns as in ``TransferTable``."""

    src: np.ndarray
    dst: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    hop: np.ndarray
    wanted: np.ndarray
    parent: np.ndarray
    numel: np.ndarray
    sent: Fractions
    """By holder set: the fractions that its ranks really send."""
    received: Fractions
    """By receiver set: the fractions that its ranks really receive."""


@dataclass(slots=True)
class Rows:
    """Transfers in the making, one chunk of columns per ``add``."""

    ndim: int
    chunks: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    count: int = 0

    def add(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        box: tuple[np.ndarray, np.ndarray],
        hop: np.ndarray | int,
        parent: np.ndarray | int = -1,
        wanted: np.ndarray | bool = True,
    ) -> np.ndarray:
        """Returns the row numbers of the new transfers."""
        size = len(box[0])
        columns = (np.broadcast_to(np.asarray(value), (size,)) for value in (src, dst, hop, parent, wanted))
        self.chunks.append((*columns, *box))
        self.count += size
        return np.arange(self.count - size, self.count)

    def template(self, sent: Fractions, received: Fractions) -> Template:
        if not self.chunks:
            none, box = np.zeros(0, np.int64), np.zeros((0, self.ndim), np.int64)
            self.chunks.append((none, none, none, none, none, box, box))
        src, dst, hop, parent, wanted, start, stop = (np.concatenate(column) for column in zip(*self.chunks))
        return Template(
            src=src.astype(np.int32),
            dst=dst.astype(np.int32),
            start=start,
            stop=stop,
            hop=hop.astype(np.int16),
            wanted=wanted.astype(bool),
            parent=parent.astype(np.int32),
            numel=np.prod(stop - start, axis=1),
            sent=sent,
            received=received,
        )


def route_demand(demand: Demand, shares: Shares, chains: int, itemsize: int, stripe_bytes: int) -> Template:
    """``chains`` is the number of copies that the holders send themselves; further domains are served by domains that
    already have one."""
    rows = Rows(demand.atoms.start.shape[1])
    axis = row_axis(demand.atoms, shares.parts(demand), itemsize)
    for holder, rank, atoms in demand.local:
        rows.add(holder, rank, _boxes(demand, atoms), 0)
    for position, (needer, holders, atoms) in enumerate(demand.near):
        _route_near(rows, demand, axis, needer, holders, atoms, shares.near.get(position), stripe_bytes)
    source = source_segments(demand, axis, shares, stripe_bytes)
    targets = [target_segments(demand, axis, target, shares, stripe_bytes) for target in range(demand.far.shape[1])]
    if (demand.copies > chains).any():
        start = unite([source, *targets])
        Relay(rows, demand, axis, start).route(targets, chains, owners_at(source, start))
    else:
        for target, segments in enumerate(targets):
            start = unite([source, segments])
            Relay(rows, demand, axis, start).route_direct(target, segments, owners_at(source, start))
    return rows.template(source.dealt, _dealt(targets))


def _dealt(targets: list[Segments]) -> dict[int, np.ndarray]:
    return {number: fractions for segments in targets for number, fractions in segments.dealt.items()}


def _boxes(demand: Demand, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return demand.atoms.start[atoms], demand.atoms.stop[atoms]


def source_segments(demand: Demand, axis: RowAxis, shares: Shares, stripe_bytes: int) -> Segments:
    """Which holder sends which rows."""
    first = np.array([codes[0] for codes in demand.holders], np.int64)
    classes = [
        (index, np.flatnonzero(demand.atoms.holders == index), demand.holders[index], share)
        for index, share in shares.senders.items()
    ]
    return segment(axis, first[demand.atoms.holders], classes, stripe_bytes)


def target_segments(demand: Demand, axis: RowAxis, target: int, shares: Shares, stripe_bytes: int) -> Segments:
    """Which rank of a target receives which rows; -1 for atoms that it does not need."""
    need = demand.far[:, target]
    first = np.array([*(ranks[0] for ranks in demand.receivers), -1], np.int64)
    classes = [
        (index, np.flatnonzero(need == index), demand.receivers[index], shares.receivers[index])
        for index in np.unique(need).tolist()
        if index in shares.receivers
    ]
    return segment(axis, first[need], classes, stripe_bytes)


def _route_near(
    rows: Rows,
    demand: Demand,
    axis: RowAxis,
    needer: int,
    holders: tuple[int, ...],
    atoms: np.ndarray,
    share: np.ndarray | None,
    stripe_bytes: int,
) -> None:
    """From holders in the needer's own domain, over the fast link."""
    if share is None:
        rows.add(holders[0], needer, _boxes(demand, atoms), 0)
        return
    nobody = np.zeros(len(demand.atoms.start), np.int64)
    segments = segment(axis, nobody, [(0, atoms, holders, share)], stripe_bytes)
    atom, low, high = stripe_boxes(demand.atoms, axis, segments.start)
    mine = np.isin(atom, atoms)
    rows.add(segments.owner[mine], needer, (low[mine], high[mine]), 0)


class Relay:
    """Lays transfers for a set of stripes: into the first domains from the holders, into later ones from earlier ones,
    and from each receiver to its siblings."""

    def __init__(self, rows: Rows, demand: Demand, axis: RowAxis, start: np.ndarray) -> None:
        self.rows, self.demand, self.start = rows, demand, start
        self.atom, self.low, self.high = stripe_boxes(demand.atoms, axis, start)

    def route_direct(self, target: int, segments: Segments, sender: np.ndarray) -> None:
        """Every stripe that ``target`` needs comes from ``sender`` (by stripe)."""
        need = self.demand.far[self.atom, target]
        wanted = np.flatnonzero(need >= 0)
        receiver = owners_at(segments, self.start)[wanted]
        box = self.low[wanted], self.high[wanted]
        into = self.rows.add(sender[wanted], receiver, box, 0)
        self._fan_out(need[wanted], receiver, box, np.zeros(len(wanted), np.int64), into)

    def route(
        self,
        targets: list[Segments],
        chains: int,
        sender: np.ndarray,
        first_hop: np.ndarray | None = None,
        first_parent: np.ndarray | None = None,
    ) -> None:
        """``chains`` copies of each stripe come from ``sender``, who forwards the transfer ``first_parent`` when that
        is not -1. The target at position p among those that need a stripe is fed by the one at position p - chains."""
        stripes = len(self.start)
        first_hop = np.zeros(stripes, np.int64) if first_hop is None else first_hop
        first_parent = np.full(stripes, -1, np.int64) if first_parent is None else first_parent
        far = self.demand.far[self.atom]
        place = np.where(far >= 0, np.cumsum(far >= 0, axis=1) - 1, -1)
        arrived = np.full(far.shape, -1, np.int64)  # row of the transfer into each target
        owner = np.full(far.shape, -1, np.int64)  # the rank that received it there
        for target, segments in enumerate(targets):
            wanted = np.flatnonzero(far[:, target] >= 0)
            receiver = owners_at(segments, self.start)[wanted]
            depth = place[wanted, target] // chains
            hop, parent, source = first_hop[wanted] + depth, first_parent[wanted], sender[wanted]
            later = np.flatnonzero(depth)
            stripe = wanted[later]
            before = (place[stripe] == (place[stripe, target] - chains)[:, None]).argmax(axis=1)
            parent[later], source[later] = arrived[stripe, before], owner[stripe, before]
            box = self.low[wanted], self.high[wanted]
            into = self.rows.add(source, receiver, box, hop, parent)
            arrived[wanted, target], owner[wanted, target] = into, receiver
            self._fan_out(far[wanted, target], receiver, box, hop, into)

    def _fan_out(
        self,
        need: np.ndarray,
        receiver: np.ndarray,
        box: tuple[np.ndarray, np.ndarray],
        hop: np.ndarray,
        into: np.ndarray,
    ) -> None:
        for index in np.unique(need).tolist():
            siblings = self.demand.receivers[index]
            mine = np.flatnonzero(need == index)
            for sibling in siblings if len(siblings) > 1 else ():
                of = mine[receiver[mine] != sibling]
                self.rows.add(receiver[of], sibling, (box[0][of], box[1][of]), hop[of] + 1, into[of])
