"""How much of a plan's messages a rank stages; pure."""

from __future__ import annotations

import numpy as np

from refit_transport.layout.layout import ITEMSIZE

from .plan import IN_FLIGHT, Plan, Slab, TransferGroup


def staged_bytes(plan: Plan) -> int:
    """At least what the busiest rank stages of messages in and out, in all buckets that are in flight at once."""
    size = max(plan.world, default=0) + 1
    loads: dict[Slab, np.ndarray] = {}
    busiest = 0
    for bucket in plan.buckets:
        staged = np.zeros(size, np.int64)
        for slab in bucket:
            key = slab._replace(member=0)
            if key not in loads:
                loads[key] = _staged_by_rank(plan.groups[slab.group], slab.start, slab.stop, size)
            staged += loads[key]
        busiest = max(busiest, int(staged.max()))
    return busiest * IN_FLIGHT


def _staged_by_rank(group: TransferGroup, first: int, last: int, size: int) -> np.ndarray:
    """int64 [size]: what rows ``[first, last)`` of a member make each rank stage."""
    table, numel = group.transfers, group.transfers.numel
    if group.shape:
        start, stop = table.start[:, group.slab_dim], table.stop[:, group.slab_dim]
        rows = np.maximum(np.minimum(stop, last) - np.maximum(start, first), 0)
        numel = numel // np.maximum(stop - start, 1) * rows
    nbytes = np.where(table.src != table.dst, numel * ITEMSIZE[group.wire_dtype], 0)
    return sum(np.bincount(end, nbytes, size).astype(np.int64) for end in (table.src, table.dst))
