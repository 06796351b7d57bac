"""The plan: who sends which region to whom, over which link, in which bucket. Plain data, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from refit_transport.layout.layout import LogicalParameter

from .transfers import Link, Transfer, TransferTable

__all__ = [
    "IN_FLIGHT",
    "PLANNER_VERSION",
    "Link",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Route",
    "Slab",
    "Transfer",
    "TransferGroup",
    "TransferTable",
]

PLANNER_VERSION = 3
"""Part of every digest: ranks that run planners of different versions refuse each other."""


IN_FLIGHT = 4
"""Buckets staged at once. At the end of each one a rank waits for its slowest flow, and the other flows go on with the
buckets behind it: two open buckets of twice the size take the same memory and leave links idle more often."""


class Route(IntEnum):
    """How a parameter travels."""

    RESHARD = 0
    """Shard to shard: exact intersections, once per domain."""
    BROADCAST = 1
    """Gathered and broadcast: whole tensors to every inference rank that needs them (see ``broadcast_root``)."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything besides the two descriptions and the domains that a plan depends on."""

    bucket_bytes: int = 256 << 20
    """Half of what one rank may stage at once, in plus out: two such buckets, as four of half the size (see
    ``fill_bytes``)."""
    stripe_bytes: int = 64 << 10
    """A region is not cut into stripes smaller than this."""
    once_per_domain: bool = True
    """A byte crosses into a domain once; False sends to every replica (the flat scheme, for comparison)."""
    relay: str = "auto"
    """Domain-to-domain relay of a copy: ``auto`` (when it lowers the bottleneck), ``never``, ``always``."""
    network_ports: str = "rank"
    """Who has a network port of its own, which is what ``relay: auto`` counts: every ``rank``, or every ``domain``,
    whose ranks share it."""
    broadcast_root: str = "every"
    """``single``: whole tensors are gathered on the lowest trainer rank, which broadcasts them. ``every``: each trainer
    rank is the root of the part it holds, so that all trainer links share the work."""
    wire_dtype: str = "auto"
    """``auto`` (the side where fewer bytes cross casts), or a dtype name that floating tensors travel in, save those of
    which both sides hold more than it can."""

    @property
    def fill_bytes(self) -> int:
        """Most bytes that one rank stages for one bucket of the plan: ``IN_FLIGHT`` of them are staged at once."""
        return max(1, 2 * self.bucket_bytes // IN_FLIGHT)


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Parameters that travel alike: same shape, dtypes, route and layouts, hence the same transfers."""

    route: Route
    shape: tuple[int, ...]
    src_dtype: str
    dst_dtype: str
    wire_dtype: str
    whole: bool
    """The destination is the full tensor, handed to the model's loader, not a live view."""
    members: tuple[int, ...]
    """Indices into ``Plan.parameters``, in travel order."""
    transfers: TransferTable
    """A sequence of ``Transfer`` whose columns are numpy arrays."""
    targets: tuple[int, ...] = ()
    """Ranks of the destination layout, ascending."""
    slab_dim: int = 0
    """The dimension whose rows are dealt out to buckets."""


class Slab(NamedTuple):
    """A member's share of a bucket: rows ``[start, stop)`` of the group's ``slab_dim`` (all of them when it fits; a 0-D
    member has one row)."""

    group: int
    member: int
    """Index into the group's ``members``."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole refit. Every rank of both sides derives the same plan and compares ``digest`` before the first byte."""

    parameters: tuple[LogicalParameter, ...]
    """As the trainers hold them, sorted by travel order."""
    groups: tuple[TransferGroup, ...]
    buckets: tuple[tuple[Slab, ...], ...]
    domains: tuple[tuple[int, ...], ...]
    """Ranks by domain; every rank is in exactly one."""
    options: PlanOptions
    digest: str = field(default="")
    unused: tuple[str, ...] = ()
    """Names that the trainers hold and no inference rank wants."""

    @property
    def world(self) -> tuple[int, ...]:
        return tuple(sorted(rank for domain in self.domains for rank in domain))


class PlanError(ValueError):
    """The two descriptions cannot be joined: names the parameter, the gap or overlap, and the ranks."""
