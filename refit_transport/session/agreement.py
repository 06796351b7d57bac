"""From what the members hold and need to one plan that all of them computed alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from refit_transport.layout.describe import Holding, describe
from refit_transport.layout.layout import LogicalParameter
from refit_transport.planning import plan_refit
from refit_transport.planning.groups import FLOATS
from refit_transport.planning.plan import Plan, Route
from refit_transport.quantization.formats import check_cuts, format_named
from refit_transport.transports.base import Transport

from .errors import HandshakeError
from .hello import Hello, domains_of
from .holdings import EMPTY, SideReport, merge_parameters, report_sink, report_source

if TYPE_CHECKING:
    from .member import RefitMember


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
    left_out: tuple[str, ...] = ()
    """As ``PlanSummary.left_out``."""


@dataclass(frozen=True)
class PlanSummary:
    """What a coordinator tells its user of a plan."""

    digest: str
    buckets: int
    reshard: int
    """Tensors that go shard to shard to some inference rank."""
    broadcast: int
    """Tensors that some inference rank needs whole."""
    unused: tuple[str, ...]
    """Tensors that no inference rank needs."""
    reasons: dict[str, str]
    kept_wide: dict[str, str] = field(default_factory=dict)
    """Tensors that both sides hold in a wider dtype than the option ``wire_dtype`` forces, and the dtype in which they
    travel instead."""
    left_out: tuple[str, ...] = ()
    """Tensors of the engines' draft models that no trainer sends."""

    def line(self) -> str:
        text = (
            f"plan {self.digest[:12]}: {self.reshard} tensors shard to shard, {self.broadcast} broadcast, "
            f"{self.buckets} buckets"
        )
        if self.unused:
            text += f"; not needed by any engine: {_some(self.unused)}"
        if self.left_out:
            text += f"; draft model left out, since no trainer sends it: {_some(self.left_out)}"
        if self.kept_wide:
            text += f"; wider on both sides than wire_dtype: {_some([f'{n} ({d})' for n, d in self.kept_wide.items()])}"
        if self.reasons:
            text += f"; asked to go directly but loaded whole: {_some([f'{n} ({w})' for n, w in self.reasons.items()])}"
        return text


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def summarise_plan(agreement: Agreement) -> PlanSummary:
    plan = agreement.plan
    members = {route: {m for g in plan.groups if g.route is route for m in g.members} for route in Route}
    return PlanSummary(
        digest=plan.digest,
        buckets=len(plan.buckets),
        reshard=len(members[Route.RESHARD]),
        broadcast=len(members[Route.BROADCAST]),
        unused=tuple(plan.unused),
        reasons=agreement.reasons,
        left_out=agreement.left_out,
        kept_wide={
            plan.parameters[member].name: group.wire_dtype
            for group in plan.groups
            if group.wire_dtype in FLOATS and plan.options.wire_dtype not in ("auto", group.wire_dtype)
            for member in group.members
        },
    )


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
    left_out = tuple(sorted({name for report in needed for name in report.left_out}))
    return Agreement(plan, tuple(parameters), tuple(hellos), _whole(needed[member.rank], plan), reasons, left_out)


def _held(member: RefitMember) -> SideReport:
    return report_source(member.source) if member.source is not None else EMPTY


def _needed(member: RefitMember, parameters: list[LogicalParameter], transport: Transport) -> SideReport:
    if member.sink is None:
        return EMPTY
    direct = transport.direct_names(parameters, member.options)
    description = member.sink.describe(parameters, direct)
    if form := format_named(member.options.get("quantize")):
        check_cuts(form, parameters, description.direct)
    return report_sink(description, parameters)


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
