"""Routes a demand: turns atoms into transfers that cross into each domain once and spread out inside it.

The result is a template in slot codes, shared by all groups whose demand and shares are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .copies import Fractions, OwnCopies, copy_segments
from .demand import Demand
from .stripes import Dealer, RowAxis, Segments, owners_at, row_axis, stripe_boxes, unite


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
class Chains:
    """How copies get from domain to domain: the first ones from the holders, each further one from a domain before."""

    own: OwnCopies
    turn: int
    """Which target comes first, so that all take turns in relaying."""

    def of_atoms(self, demand: Demand) -> np.ndarray:
        """int64 [atoms]: the number of chains, that is of copies sent by the holders."""
        copies = demand.copies
        chains = np.ones(len(copies), np.int64)
        for number, of_set in self.own.items():
            for needed, sent in of_set.items():
                chains[(demand.atoms.holders == number) & (copies == needed)] = sent
        return chains


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


def route_demand(demand: Demand, shares: Shares, chains: Chains, itemsize: int, stripe_bytes: int) -> Template:
    """The transfers that serve a demand."""
    rows = Rows(demand.atoms.start.shape[1])
    axis = row_axis(demand.atoms, shares.parts(demand), itemsize)
    for holder, rank, atoms in demand.local:
        rows.add(holder, rank, _boxes(demand, atoms), 0)
    for position, (needer, holders, atoms) in enumerate(demand.near):
        _route_near(rows, demand, axis, needer, holders, atoms, shares.near.get(position), stripe_bytes)
    sources, sent = copy_segments(demand, axis, shares.senders, chains.own, stripe_bytes)
    targets = target_segments(demand, axis, shares, stripe_bytes)
    common = unite(targets) if targets else axis.first[:-1]
    alike: dict[bytes, list[int]] = {}
    for copy, segments in enumerate(sources):
        alike.setdefault(segments.start.tobytes(), []).append(copy)
    for copies in alike.values():
        relay = Relay(rows, demand, axis, np.union1d(common, sources[copies[0]].start))
        senders = np.stack([owners_at(sources[copy], relay.start) for copy in copies], axis=1)
        relay.route(targets, chains, copies, senders)
    return rows.template(sent, dealt_to(targets))


def dealt_to(targets: list[Segments]) -> Fractions:
    return {number: fractions for segments in targets for number, fractions in segments.dealt.items()}


def _boxes(demand: Demand, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return demand.atoms.start[atoms], demand.atoms.stop[atoms]


def source_segments(demand: Demand, axis: RowAxis, shares: Shares, stripe_bytes: int) -> Segments:
    """Which holder sends which rows, if each byte leaves its holders once."""
    first = np.array([codes[0] for codes in demand.holders], np.int64)
    classes = [
        (index, np.flatnonzero(demand.atoms.holders == index), demand.holders[index], share)
        for index, share in shares.senders.items()
    ]
    return Dealer(axis, stripe_bytes).segment(first[demand.atoms.holders], classes)


def target_segments(demand: Demand, axis: RowAxis, shares: Shares, stripe_bytes: int) -> list[Segments]:
    """For each target, which of its ranks receives which rows; -1 for atoms that it does not need."""
    first = np.array([*(ranks[0] for ranks in demand.receivers), -1], np.int64)
    dealer = Dealer(axis, stripe_bytes)
    found = []
    for target in range(demand.far.shape[1]):
        need = demand.far[:, target]
        classes = [
            (index, np.flatnonzero(need == index), demand.receivers[index], shares.receivers[index])
            for index in np.unique(need).tolist()
            if index in shares.receivers
        ]
        found.append(dealer.segment(first[need], classes))
    return found


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
    segments = Dealer(axis, stripe_bytes).segment(nobody, [(0, atoms, holders, share)])
    atom, low, high = stripe_boxes(demand.atoms, axis, segments.start)
    mine = np.isin(atom, atoms)
    rows.add(segments.owner[mine], needer, (low[mine], high[mine]), 0)


class Relay:
    """Lays transfers for a set of stripes: into the first domains from the holders, into later ones from earlier ones,
    and from each receiver to its siblings."""

    def __init__(self, rows: Rows, demand: Demand, axis: RowAxis, start: np.ndarray) -> None:
        self.rows, self.start = rows, start
        self.atom, self.low, self.high = stripe_boxes(demand.atoms, axis, start)
        self.demand, self.far = demand, demand.far[self.atom]
        self.siblings = _padded(demand.receivers)

    def route(
        self,
        targets: list[Segments],
        chains: Chains,
        copies: Sequence[int] | None,
        senders: np.ndarray,
        first_hop: np.ndarray | None = None,
        first_parent: np.ndarray | None = None,
    ) -> None:
        """Serves the targets that get one of ``copies`` (None: all), of which ``senders`` [stripes, copies] send the
        first; the sender forwards the transfer ``first_parent`` if that is not -1. With c chains, the target at place p
        among those that need a stripe is fed by the one at p - c, and gets copy p modulo c."""
        needed = self.far >= 0
        of = np.maximum(needed.sum(axis=1, keepdims=True), 1)
        place = np.where(needed, (np.cumsum(needed, axis=1) - 1 + chains.turn) % of, -1)
        count = chains.of_atoms(self.demand)[self.atom]
        column = np.zeros(count.max(initial=0) + 1, np.int64)
        if copies is not None:
            column[:] = -1
            column[list(copies)] = np.arange(len(copies))
        column = column[place % count[:, None]]
        depths = np.where(needed & (column >= 0), place // count[:, None], -1)
        receiver = np.array([owners_at(segments, self.start) for segments in targets]).reshape(self.far.shape[::-1]).T
        arrived = np.full(self.far.shape, -1, np.int64)  # row of the transfer into each target
        for depth in range(depths.max(initial=-1) + 1):
            stripe, target = np.nonzero(depths == depth)
            if depth:
                before = (place[stripe] == (place[stripe, target] - count[stripe])[:, None]).argmax(axis=1)
                parent, source = arrived[stripe, before], receiver[stripe, before]
            else:
                parent = first_parent[stripe] if first_parent is not None else -1
                source = senders[stripe, column[stripe, target]]
            hop = depth + (first_hop[stripe] if first_hop is not None else 0)
            box = self.low[stripe], self.high[stripe]
            arrived[stripe, target] = self.rows.add(source, receiver[stripe, target], box, hop, parent)
        self._fan_out(*np.nonzero(depths >= 0), depths, receiver, arrived, first_hop)

    def _fan_out(
        self,
        stripe: np.ndarray,
        target: np.ndarray,
        depth: np.ndarray,
        receiver: np.ndarray,
        arrived: np.ndarray,
        first_hop: np.ndarray | None,
    ) -> None:
        """What arrived in a target goes on to all other ranks that need it there."""
        at = receiver[stripe, target]
        siblings = self.siblings[self.far[stripe, target]]
        which, column = np.nonzero((siblings >= 0) & (siblings != at[:, None]))
        stripe, target = stripe[which], target[which]
        hop = depth[stripe, target] + 1 + (first_hop[stripe] if first_hop is not None else 0)
        box = self.low[stripe], self.high[stripe]
        self.rows.add(at[which], siblings[which, column], box, hop, arrived[stripe, target])


def _padded(sets: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """int64 [sets, longest], filled up with -1."""
    table = np.full((len(sets), max(map(len, sets), default=0)), -1, np.int64)
    for number, ranks in enumerate(sets):
        table[number, : len(ranks)] = ranks
    return table
