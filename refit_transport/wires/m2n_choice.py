"""Agrees among all ranks on which transfer groups go over M2N: each says what it holds, rank 0 puts it together."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from refit_transport.layout.layout import Layout
from refit_transport.layout.region import LayoutError, Region
from refit_transport.layout.sharding import region_layout
from refit_transport.planning.m2n import Choice, choose_wires, is_candidate, sink_layout
from refit_transport.planning.plan import Plan
from refit_transport.runtime.binding import Binding

from .base import WireError

log = logging.getLogger("refit_transport")

Held = dict[int, list[Region]]
"""Group -> regions that this rank holds of its members as a source."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank tells the others."""

    held: Held
    apart: list[int]
    """Candidate groups whose destination on this rank is no single tensor."""

    @classmethod
    def of(cls, binding: Binding) -> Holding:
        """Asks the engine for views, so it belongs to the thread and the stream that refit."""
        return cls(_held(binding), _apart(binding))


def agree_on_wires(
    plan: Plan, holding: Holding, rank: int, place: Mapping[int, int], store: dist.Store, deadline: float
) -> list[Choice]:
    """One choice per group of the plan, the same on every rank; ``place`` has all of them. Raises WireError naming the
    rank that did not answer by ``deadline``."""
    store.set(f"holds {rank}", json.dumps([_encoded(holding.held), holding.apart]))
    if rank == min(place):
        reports = {other: _get(store, f"holds {other}", other, deadline) for other in place}
        store.set("all", json.dumps(list(reports.items())))
    reports = dict(_get(store, "all", min(place), deadline))
    apart = {
        group: f"rank {other} stores it in several places" for other, (_, groups) in reports.items() for group in groups
    }
    sources = _source_layouts(plan, {other: _decoded(held) for other, (held, _) in reports.items()})
    choices = choose_wires(plan, sources, place, apart)
    if rank == min(place):
        log.info(summary(plan, choices))
    return choices


def summary(plan: Plan, choices: Sequence[Choice]) -> str:
    """One line: how many parameters and bytes take each wire, and why not M2N."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for group, choice in zip(plan.groups, choices, strict=True):
        counts[choice.wire] += len(group.members)
        nbytes[choice.wire] += sum(plan.parameters[member].nbytes for member in group.members)
        if choice.geometry is None:
            reasons[choice.reason] += len(group.members)
    parts = [f"{counts[w]} parameters ({nbytes[w] / 1e6:.1f} MB) over {w}" for w in ("nccl_m2n", "nccl")]
    why = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common(4))
    return "wire nccl_m2n: " + ", ".join(parts) + (f" ({why})" if why else "")


def _held(binding: Binding) -> Held:
    """By group, through its first member: all members are laid out alike."""
    if binding.source is None:
        return {}
    holdings, plan = binding.source.holdings(), binding.plan
    names = {n: plan.parameters[g.members[0]].name for n, g in enumerate(plan.groups) if is_candidate(g)}
    return {number: list(holdings[name]) for number, name in names.items() if holdings.get(name)}


def _apart(binding: Binding) -> list[int]:
    found = []
    for number, group in enumerate(binding.plan.groups):
        if binding.sink is None or not is_candidate(group):
            continue
        regions = sink_layout(group).regions_of(binding.rank)
        try:
            for region in regions:
                binding.sink.view(binding.plan.parameters[group.members[0]].name, region)
        except (KeyError, ValueError):
            found.append(number)
    return found


def _source_layouts(plan: Plan, held: Mapping[int, Held]) -> list[Layout | None]:
    layouts: list[Layout | None] = []
    for number, group in enumerate(plan.groups):
        regions = {rank: groups[number] for rank, groups in held.items() if number in groups}
        try:
            layouts.append(region_layout(group.shape, regions) if regions else None)
        except LayoutError:
            layouts.append(None)
    return layouts


def _encoded(held: Held) -> list:
    return [[number, [[region.start, region.stop] for region in regions]] for number, regions in held.items()]


def _decoded(held: list) -> Held:
    return {number: [Region(tuple(a), tuple(b)) for a, b in regions] for number, regions in held}


def _get(store: dist.Store, key: str, rank: int, deadline: float) -> list:
    try:
        store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        return json.loads(store.get(key))
    except RuntimeError as error:
        raise WireError(f"rank {rank} did not say what it holds: {error}", peer=rank, phase="bind") from error
