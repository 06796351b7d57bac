"""Turns jobs into tables of transfers, with the bytes of a whole plan shared out evenly."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from .balance import Candidates, Ledger
from .demand import decode
from .fabric import Fabric
from .jobs import ONE_CHAIN, Job
from .plan import PlanOptions
from .route import Fractions, Shares, Template, route_demand
from .route_broadcast import route_through_root
from .transfers import TransferTable


@dataclass(slots=True)
class Router:
    """Routes jobs in plan order; jobs of equal key and shares have one template."""

    fabric: Fabric
    options: PlanOptions
    chains: int
    """Copies of each byte that its holders send themselves."""
    senders: Ledger
    receivers: Ledger
    near: Ledger
    _templates: dict[tuple[object, ...], tuple[Template, np.ndarray]] = field(default_factory=dict, init=False)
    _fans: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)

    def route(self, job: Job) -> TransferTable:
        shares = self._shares(job)
        key = (job.key, job.spec.itemsize, shares.key())
        if key not in self._templates:
            template = self._template(job, shares)
            self._templates[key] = template, self._fan(template)
        template, fan = self._templates[key]
        self._charge(job, template)
        src, dst = decode(template.src, job.slot_ranks), decode(template.dst, job.slot_ranks)
        ndim = len(job.spec.shape)
        return TransferTable(
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

    def _template(self, job: Job, shares: Shares) -> Template:
        itemsize, stripe_bytes = job.spec.itemsize, self.options.stripe_bytes
        if job.root is None:
            return route_demand(job.demand, shares, self.chains, itemsize, stripe_bytes)
        chains = self.chains if self.options.relay == "never" else ONE_CHAIN
        return route_through_root(job.demand, shares, chains, itemsize, stripe_bytes, job.root)

    def _shares(self, job: Job) -> Shares:
        senders: Fractions = {}
        for number, by_copies in job.sending():
            if len(job.holders[number]) > 1:
                elements = sum(by_copies.values())
                amount = self._copied(by_copies) * job.weight
                senders[number] = self._share(self.senders, job, job.holders[number], elements, amount)
        receivers: Fractions = {}
        for number, (ranks, elements) in enumerate(zip(job.demand.receivers, job.demand.receiving)):
            if len(ranks) > 1:
                receivers[number] = self._share(self.receivers, job, ranks, elements, elements * job.weight)
        near: Fractions = {}
        for position, holders, elements in job.lending():
            if len(holders) > 1:
                share = self._share(self.near, job, holders, elements, elements * job.weight)
                near[position] = share
                self.near.charge(holders, share * elements * job.weight)
        return Shares(senders, receivers, near)

    def _share(self, ledger: Ledger, job: Job, candidates: Candidates, elements: int, amount: float) -> np.ndarray:
        parts = max(1, elements * job.spec.itemsize // self.options.stripe_bytes)
        return ledger.shares(candidates, amount, parts)

    def _copied(self, by_copies: dict[int, int]) -> int:
        return sum(min(self.chains, copies) * elements for copies, elements in by_copies.items())

    def _charge(self, job: Job, template: Template) -> None:
        """Notes what the cuts really gave each rank."""
        sending = dict(job.sending())
        for number, fractions in template.sent.items():
            self.senders.charge(job.holders[number], fractions * self._copied(sending[number]) * job.weight)
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
