"""From a trainer layout and an engine layout to bound programs, by the same steps as a session takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refit_transport.engines.base import WeightSink
from refit_transport.layout.describe import describe, group_holdings
from refit_transport.layout.region import Region
from refit_transport.planning import Plan, compile_program, plan_refit
from refit_transport.runtime.binding import Binding
from refit_transport.session.holdings import merge_parameters, report_source
from refit_transport.session.totals import Expected, expected_of
from refit_transport.trainers.base import WeightSource
from refit_transport.transports.registry import get_transport
from tests.planning.sides import Link, bytes_by_rank

from .engines import EngineRank, engine_ranks
from .policies import policy
from .trainers import sources

PATHS: dict[str, dict[str, Any]] = {
    "all": {"transport": "nccl_reshard", "scope": "all", "bucket_bytes": 12_000},
    "ffn": {"transport": "nccl_reshard", "scope": "ffn", "bucket_bytes": 30_000},
    "broadcast": {"transport": "gather_broadcast", "bucket_bytes": 40_000},
    "broadcast from one root": {"transport": "gather_broadcast", "root": "single", "bucket_bytes": 40_000},
}
"""Options of a session. Every bucket is smaller than the embedding, which has to travel in parts."""


@dataclass
class Refit:
    """One pair of the matrix, ready to run. Trainers have the joint ranks from 0 on, then the engines."""

    plan: Plan
    bindings: dict[int, Binding]
    engines: dict[int, EngineRank]
    expected: dict[int, Expected]


def prepare(
    trainer: str, engine: str, policy_name: str, path: str, domains: str = "sides", dtype: torch.dtype = torch.float32
) -> Refit:
    """Plan and bind a pair of layouts for a policy. ``domains``: ``sides`` (trainers, and each pair of engine ranks),
    ``one`` for all, or ``each`` rank its own."""
    held = sources(trainer, policy_name)
    ranks = engine_ranks(policy(policy_name), engine, dtype)
    engines = dict(enumerate(ranks, start=len(held)))
    plan = plan_of(held, {rank: e.sink for rank, e in engines.items()}, PATHS[path], domains_of(held, ranks, domains))
    programs = {rank: compile_program(plan, rank) for rank in plan.world}
    sides = {rank: (source, None) for rank, source in enumerate(held)} | {r: (None, e.sink) for r, e in engines.items()}
    whole = frozenset(m for group in plan.groups if group.whole for m in group.members)
    return Refit(
        plan,
        {rank: Binding(plan, program, *sides[rank]) for rank, program in programs.items()},
        engines,
        {rank: expected_of(program, whole) for rank, program in programs.items()},
    )


def plan_of(
    held: Sequence[WeightSource],
    sinks: Mapping[int, WeightSink],
    options: Mapping[str, Any],
    domains: Sequence[Sequence[int]],
) -> Plan:
    """The plan that a session of these members agrees on."""
    transport = get_transport(options["transport"])
    parameters = merge_parameters([report_source(source) for source in held])
    direct = transport.direct_names(parameters, options)
    described = {rank: sink.describe(parameters, direct) for rank, sink in sinks.items()}
    trainers = {rank: group_holdings(s.parameters(), s.holdings()) for rank, s in enumerate(held)}
    engines = {rank: group_holdings(parameters, d.direct, d.whole, d.dtypes) for rank, d in described.items()}
    return plan_refit(
        describe(trainers), describe(engines), tuple(parameters), domains, transport.plan_options(options)
    )


def domains_of(held: Sequence[WeightSource], ranks: Sequence[EngineRank], how: str) -> tuple[tuple[int, ...], ...]:
    trainers, world = len(held), len(held) + len(ranks)
    if how == "one":
        return (tuple(range(world)),)
    if how == "each":
        return tuple((rank,) for rank in range(world))
    return (tuple(range(trainers)), *(tuple(range(a, min(a + 2, world))) for a in range(trainers, world, 2)))


def bytes_on_links(plan: Plan) -> dict[str, int]:
    """Bytes that a refit moves by link class, summed over the plan's transfers (not over what ranks compiled)."""
    return {link.name.lower(): int(bytes_by_rank(plan, link)[0].sum()) for link in Link}


def assembled(held: Sequence[WeightSource]) -> dict[str, torch.Tensor]:
    """The checkpoint that these trainers would save together; NaN where nobody holds anything. Raises AssertionError
    when two replicas differ."""
    full: dict[str, torch.Tensor] = {}
    for source in held:
        for parameter in source.parameters():
            full.setdefault(parameter.name, torch.full(parameter.shape, float("nan")))
        for name, regions in source.holdings().items():
            for region in regions:
                _put(full[name], name, region, source.view(name, region))
    return full


def _put(full: torch.Tensor, name: str, region: Region, part: torch.Tensor) -> None:
    known = full[region.slices()]
    assert torch.equal(torch.where(known.isnan(), part, known), part), f"replicas of {name} differ in {region}"
    full[region.slices()] = part
