"""From what the members hold and need to one plan that all of them computed alike."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refit_transport.layout.describe import Holding, describe
from refit_transport.layout.layout import LogicalParameter
from refit_transport.planning import plan_refit
from refit_transport.planning.plan import Plan
from refit_transport.transports.base import Transport

from .errors import HandshakeError
from .hello import Hello, domains_of
from .holdings import EMPTY, SideReport, merge_parameters, report_sink, report_source

if TYPE_CHECKING:
    from .member import RefitMember

log = logging.getLogger("refit_transport")


@dataclass(frozen=True)
class Agreement:
    """What all members of a session hold in common once their digests matched."""

    plan: Plan
    parameters: tuple[LogicalParameter, ...]
    hellos: tuple[Hello, ...]
    whole: frozenset[int]
    """Indices into ``plan.parameters`` of what takes the broadcast path on this rank."""
    reasons: dict[str, str]
    """Parameters that were to go shard to shard and take the loader's way on some inference rank, with the reason."""


def agree_on_plan(member: RefitMember, hellos: Sequence[Hello], transport: Transport, deadline: float) -> Agreement:
    """Exchange descriptions, plan, compare digests. Raises HandshakeError naming the ranks whose digests differ."""
    options = member.options
    held = member.exchange("holdings", _held(member), list[SideReport], deadline)
    parameters = merge_parameters(held)
    needed = member.exchange("needs", _needed(member, parameters, transport), list[SideReport], deadline)
    plan = plan_refit(
        describe({h.rank: _holdings(held[h.rank]) for h in hellos if h.role == "trainer"}),
        describe({h.rank: _holdings(needed[h.rank]) for h in hellos if h.role == "engine"}),
        tuple(parameters),
        domains_of(hellos),
        transport.plan_options(options),
    )
    _compare(member.exchange("plan digest", plan.digest, list[str], deadline), hellos)
    reasons = {name: why for report in needed for name, why in report.reasons.items()}
    if reasons and member.rank == 0:
        log.warning(
            "%d parameters take the loader's way although scope %r sends them shard to shard: %s",
            len(reasons),
            options.get("scope", "ffn"),
            "; ".join(f"{n}: {w}" for n, w in list(reasons.items())[:5]),
        )
    return Agreement(plan, tuple(parameters), tuple(hellos), _whole(needed[member.rank], plan), reasons)


def _held(member: RefitMember) -> SideReport:
    return report_source(member.source) if member.source is not None else EMPTY


def _needed(member: RefitMember, parameters: list[LogicalParameter], transport: Transport) -> SideReport:
    if member.sink is None:
        return EMPTY
    direct = transport.direct_names(parameters, member.options)
    return report_sink(member.sink.describe(parameters, direct), parameters)


def _holdings(report: SideReport) -> list[Holding]:
    return [
        Holding(tuple(report.names[m] for m in g.members), tuple(g.shape), g.dtype, g.regions, g.whole)
        for g in report.groups
    ]


def _whole(report: SideReport, plan: Plan) -> frozenset[int]:
    names = {report.names[member] for group in report.groups if group.whole for member in group.members}
    return frozenset(index for index, parameter in enumerate(plan.parameters) if parameter.name in names)


def _compare(digests: Sequence[str], hellos: Sequence[Hello]) -> None:
    common, _ = Counter(digests).most_common(1)[0]
    other = [f"{h.role} rank {h.rank}" for h, digest in zip(hellos, digests) if digest != common]
    if other:
        raise HandshakeError(
            f"plans differ: {', '.join(other)} planned {min(set(digests) - {common})[:12]}, the others "
            f"{common[:12]}; all ranks need the same version of refit_transport and the same options"
        )
