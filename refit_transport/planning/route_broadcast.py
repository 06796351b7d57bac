"""Routes a demand through one root: gathered there first, then on to every domain as if the root had held it all."""

from __future__ import annotations

import numpy as np

from .demand import Demand
from .jobs import Root
from .route import Chains, Relay, Rows, Shares, Template, dealt_to, source_segments, target_segments
from .stripes import owners_at, row_axis, unite


def route_through_root(
    demand: Demand,
    shares: Shares,
    chains: Chains,
    itemsize: int,
    stripe_bytes: int,
    root: Root,
) -> Template:
    """Parts that the root holds start from it at hop 0, all others at hop 1."""
    rows = Rows(demand.atoms.start.shape[1])
    axis = row_axis(demand.atoms, shares.parts(demand), itemsize)
    source = source_segments(demand, axis, shares, stripe_bytes)
    targets = target_segments(demand, axis, shares, stripe_bytes)
    relay = Relay(rows, demand, axis, unite([source, *targets]))
    start = relay.start
    holder = owners_at(source, start)
    wanted = root.needs[relay.atom]
    own = holder == root.code if root.code is not None else np.zeros(len(holder), bool)
    foreign, stored = np.flatnonzero(~own), np.flatnonzero(own & wanted)
    rows.add(root.rank, root.rank, (relay.low[stored], relay.high[stored]), 0)
    box = relay.low[foreign], relay.high[foreign]
    hop, parent = np.zeros(len(start), np.int64), np.full(len(start), -1, np.int64)
    hop[foreign] = 1
    parent[foreign] = rows.add(holder[foreign], root.rank, box, 0, wanted=wanted[foreign])
    chain, depth = chains.places(demand)
    senders = np.full((len(start), chain.max(initial=0) + 1), root.rank, np.int64)
    relay.route(targets, chain, depth, senders, hop, parent)
    return rows.template(source.dealt, dealt_to(targets))
