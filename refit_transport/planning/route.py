"""Routes a demand: turns atoms into transfers that cross into each domain once and spread out inside it.

The result is a template in slot codes, shared by all groups whose demand and shares are equal.
"""

from __future__ import annotations

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

    def places(self, demand: Demand) -> tuple[np.ndarray, np.ndarray]:
        """(chain, depth), both int64 [atoms, targets], -1 where a target does not need the atom. With c chains, the
        target at place p among those that need an atom is in chain p modulo c, fed by the one at place p - c."""
        needed = demand.far >= 0
        count = self.of_atoms(demand)[:, None]
        place = (np.cumsum(needed, axis=1) - 1 + self.turn) % np.maximum(demand.copies[:, None], 1)
        return np.where(needed, place % count, -1), np.where(needed, place // count, -1)


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
    chain, depth = chains.places(demand)
    alike: dict[bytes, list[int]] = {}
    for copy, segments in enumerate(sources):
        alike.setdefault(segments.start.tobytes(), []).append(copy)
    for copies in alike.values():
        relay = Relay(rows, demand, axis, np.union1d(common, sources[copies[0]].start))
        senders = np.stack([owners_at(sources[copy], relay.start) for copy in copies], axis=1)
        column = np.full(len(sources) + 1, -1, np.int64)  # the last one is for chain -1
        column[copies] = np.arange(len(copies))
        relay.route(targets, column[chain], depth, senders)
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
        self.rows, self.demand, self.start = rows, demand, start
        self.atom, self.low, self.high = stripe_boxes(demand.atoms, axis, start)

    def route(
        self,
        targets: list[Segments],
        chain: np.ndarray,
        depth: np.ndarray,
        senders: np.ndarray,
        first_hop: np.ndarray | None = None,
        first_parent: np.ndarray | None = None,
    ) -> None:
        """Serves the targets whose ``chain`` [atoms, targets] is not -1, at their ``depth`` in it. Each chain begins at
        ``senders`` [stripes, chains], who forward the transfer ``first_parent`` [stripes] if that is not -1."""
        column = np.flatnonzero((chain >= 0).any(axis=0))
        chain = chain[:, column][self.atom]
        depth = np.where(chain >= 0, depth[:, column][self.atom], -1)
        receiver = np.array([owners_at(targets[target], self.start) for target in column.tolist()], np.int64)
        receiver = receiver.reshape(len(column), len(self.start)).T
        hop_of = depth if first_hop is None else depth + first_hop[:, None]
        arrived = np.full(depth.shape, -1, np.int64)  # row of the transfer into each target
        for level in range(depth.max(initial=-1) + 1):
            stripe, target = np.nonzero(depth == level)
            of = chain[stripe, target]
            if level:
                before = ((depth[stripe] == level - 1) & (chain[stripe] == of[:, None])).argmax(axis=1)
                parent, source = arrived[stripe, before], receiver[stripe, before]
            else:
                parent = first_parent[stripe] if first_parent is not None else -1
                source = senders[stripe, of]
            box = self.low[stripe], self.high[stripe]
            into = self.rows.add(source, receiver[stripe, target], box, hop_of[stripe, target], parent)
            arrived[stripe, target] = into
        stripe, target = np.nonzero(depth >= 0)
        need = self.demand.far[self.atom[stripe], column[target]]
        self._fan_out(stripe, need, *(table[stripe, target] for table in (receiver, arrived, hop_of)))

    def _fan_out(
        self, stripe: np.ndarray, need: np.ndarray, receiver: np.ndarray, arrived: np.ndarray, hop: np.ndarray
    ) -> None:
        """What arrived at a receiver goes on to all other ranks of its set ``need``."""
        siblings = self.demand.siblings[need]
        which, column = np.nonzero((siblings >= 0) & (siblings != receiver[:, None]))
        box = self.low[stripe[which]], self.high[stripe[which]]
        self.rows.add(receiver[which], siblings[which, column], box, hop[which] + 1, arrived[which])
