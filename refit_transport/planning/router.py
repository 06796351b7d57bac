"""Turns jobs into tables of transfers, with the bytes of a whole plan shared out evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from .balance import Candidates, Ledger
from .copies import Fractions, OwnCopies
from .demand import decode
from .fabric import Fabric
from .jobs import Job
from .plan import PlanOptions
from .route import Chains, Shares, Template, route_demand
from .route_broadcast import route_through_root
from .transfers import TransferTable


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The outcome for one job."""

    table: TransferTable
    template: Template


@dataclass(slots=True)
class Router:
    """Routes jobs in plan order; jobs of equal key and shares have one template."""

    fabric: Fabric
    options: PlanOptions
    own_shares: Mapping[Candidates, float]
    """The share of its copies that each set of holders sends itself."""
    senders: Ledger
    receivers: Ledger
    near: Ledger
    _turn: int = field(default=0, init=False)
    _templates: dict[tuple[object, ...], tuple[Template, np.ndarray]] = field(default_factory=dict, init=False)
    _fans: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    def route(self, job: Job) -> Routed:
        own = job.own_copies(self.own_shares, self.options.relay)
        shares = self._shares(job, own)
        relays = any(sent < copies for of_set in own.values() for copies, sent in of_set.items())
        turn = self._turn if relays else 0
        self._turn += relays
        chains = tuple((number, *of_set.items()) for number, of_set in own.items())
        turns = tuple(turn % copies for of_set in own.values() for copies in of_set)
        key = (job.key, job.spec.itemsize, shares.key(), chains, turns)
        if key not in self._templates:
            template = self._template(job, shares, Chains(own, turn))
            self._templates[key] = template, self._fan(template)
        template, fan = self._templates[key]
        self._charge(job, template, own)
        src, dst = decode(template.src, job.slot_ranks), decode(template.dst, job.slot_ranks)
        ndim = len(job.spec.shape)
        table = TransferTable(
            src=src,
            dst=dst,
            start=template.start[:, :ndim],
            stop=template.stop[:, :ndim],
            hop=template.hop,
            link=self.fabric.links(src, dst),
            wanted=template.wanted,
            parent=template.parent,
            fan=fan,
            numel=template.numel,
        )
        return Routed(table, template)

    def _template(self, job: Job, shares: Shares, chains: Chains) -> Template:
        itemsize, stripe_bytes = job.spec.itemsize, self.options.stripe_bytes
        if job.root is None:
            return route_demand(job.demand, shares, chains, itemsize, stripe_bytes)
        return route_through_root(job.demand, shares, chains, itemsize, stripe_bytes, job.root)

    def _shares(self, job: Job, own: OwnCopies) -> Shares:
        senders: Fractions = {}
        for number, by_copies in job.sending():
            if len(job.holders[number]) > 1:
                elements = sum(by_copies.values())
                amount = _sent(job, number, by_copies, own)
                copies = 1 if job.root is not None else min(own[number].values())
                senders[number] = self._share(self.senders, job, job.holders[number], elements, amount, copies)
        receivers: Fractions = {}
        for number in job.demand.several:
            ranks, elements = job.demand.receivers[number], job.demand.receiving[number]
            receivers[number] = self._share(self.receivers, job, ranks, elements, elements * job.weight)
        near: Fractions = {}
        for position, holders, elements in job.lending():
            if len(holders) > 1:
                share = self._share(self.near, job, holders, elements, elements * job.weight)
                near[position] = share
                self.near.charge(holders, share * elements * job.weight)
        return Shares(senders, receivers, near)

    def _share(
        self, ledger: Ledger, job: Job, candidates: Candidates, elements: int, amount: float, copies: int = 1
    ) -> np.ndarray:
        parts = max(1, elements * job.spec.itemsize // self.options.stripe_bytes)
        return ledger.shares(candidates, amount, parts * copies)

    def _charge(self, job: Job, template: Template, own: OwnCopies) -> None:
        """Notes what the cuts really gave each rank."""
        sending = dict(job.sending())
        for number, fractions in template.sent.items():
            self.senders.charge(job.holders[number], fractions * _sent(job, number, sending[number], own))
        for number, fractions in template.received.items():
            elements = job.demand.receiving[number]
            self.receivers.charge(job.demand.receivers[number], fractions * elements * job.weight)

    def _fan(self, template: Template) -> np.ndarray:
        """int32 [rows]: number of the set of ranks that each transfer is forwarded to, -1 for none."""
        fan = np.full(len(template.src), -1, np.int32)
        child = np.flatnonzero(template.parent >= 0)
        if not len(child):
            return fan
        child = child[np.lexsort((template.dst[child], template.parent[child]))]
        parent, dst = template.parent[child], template.dst[child].tolist()
        edges = np.flatnonzero(np.r_[True, parent[1:] != parent[:-1], True]).tolist()
        for first, last in pairwise(edges):
            siblings = tuple(dst[first:last])
            fan[parent[first]] = self._fans.setdefault(siblings, len(self._fans))
        return fan


def _sent(job: Job, number: int, by_copies: dict[int, int], own: OwnCopies) -> int:
    """Bytes that a holder set sends for all members."""
    if job.root is not None:
        return sum(by_copies.values()) * job.weight
    return sum(own[number][copies] * elements for copies, elements in by_copies.items()) * job.weight
