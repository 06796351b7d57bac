"""The planner: two descriptions, the domains and the options make one plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from refit_transport.layout.layout import LogicalParameter, SideDescription

from .balance import Ledger, fair_fractions
from .digest import plan_digest
from .fabric import Fabric
from .filling import fill
from .groups import GroupSpec, group_entries, travel_order
from .jobs import Job, JobMaker, total_supply
from .plan import Plan, PlanError, PlanOptions
from .router import Routed, Router
from .supply import own_shares


def plan_refit(
    source: SideDescription,
    sink: SideDescription,
    parameters: Iterable[LogicalParameter],
    domains: Sequence[Sequence[int]],
    options: PlanOptions | None = None,
) -> Plan:
    """The plan of a whole refit; a pure function, so every rank may compute it or receive it.

    ``parameters`` are those of the trainers, in any order. ``domains`` lists every rank of the world once. Raises
    PlanError for a parameter that cannot be delivered completely and exactly once, with its name, region and rank.
    """
    options = options or PlanOptions()
    _check_options(options)
    ordered = travel_order(parameters)
    domains = tuple(tuple(domain) for domain in domains)
    fabric = Fabric(domains, options.once_per_domain)
    _check_ranks(source, sink, fabric)
    specs, unused = group_entries(source, sink, ordered, options)
    jobs, routed = _route(source, sink, fabric, options, ordered, specs)
    filled = fill(jobs, routed, source, sink, options, len(fabric.domain_of) - 1)
    digest = plan_digest(source, sink, ordered, domains, options)
    return Plan(ordered, filled.groups, filled.buckets, domains, options, digest, unused)


def _route(
    source: SideDescription,
    sink: SideDescription,
    fabric: Fabric,
    options: PlanOptions,
    parameters: tuple[LogicalParameter, ...],
    specs: list[GroupSpec],
) -> tuple[list[Job], list[Routed]]:
    """First adds up the whole plan, then cuts each group so that the sum is balanced."""
    maker = JobMaker(source, sink, fabric, options.broadcast_root == "single", parameters)
    jobs = [maker.make(spec) for spec in specs]
    supply = total_supply(jobs, options.relay)
    ports = fabric.domain_of if options.network_ports == "domain" else None
    shares = own_shares(supply, options.relay, ports)
    router = Router(
        fabric,
        options,
        shares,
        senders=Ledger(fair_fractions(supply.sending(shares))),
        receivers=Ledger(fair_fractions(supply.receiving)),
        near=Ledger(fair_fractions(supply.near)),
    )
    return jobs, [router.route(job) for job in jobs]


def _check_options(options: PlanOptions) -> None:
    choices = {
        "relay": ("auto", "never", "always"),
        "network_ports": ("rank", "domain"),
        "broadcast_root": ("single", "every"),
    }
    for name, allowed in choices.items():
        if getattr(options, name) not in allowed:
            raise PlanError(f"{name} is {getattr(options, name)!r}; allowed: {', '.join(allowed)}")
    for name in ("bucket_bytes", "stripe_bytes"):
        if getattr(options, name) < 1:
            raise PlanError(f"{name} is {getattr(options, name)}; it must be at least 1")


def _check_ranks(source: SideDescription, sink: SideDescription, fabric: Fabric) -> None:
    for side, role in ((source, "trainer"), (sink, "inference")):
        for layout in side.layouts:
            for rank in layout.ranks:
                if not fabric.has(rank):
                    raise PlanError(f"{role} rank {rank} has weights but is in no domain")
