"""How far buckets are filled, so that staging and whole tensors together stay within what a rank may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from refit_transport.layout.layout import SideDescription

from .buckets import Queued, fill_buckets
from .jobs import Job
from .loads import TemplateLoad, template_load
from .plan import IN_FLIGHT, PlanError, PlanOptions, Slab, TransferGroup
from .router import Routed
from .whole import busiest_layout

TRIES = 4
MARGIN = 0.98
"""Of an estimate of how full buckets may be, so that the next one is not needed for a few bytes."""
LEAST = 1 / 8
"""Buckets are not filled less than this part of what the options allow: a whole tensor that leaves no more room is
larger than the rest could make up for."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Groups with the dimension along which they are dealt out, and the buckets."""

    groups: tuple[TransferGroup, ...]
    buckets: tuple[tuple[Slab, ...], ...]


def fill(
    jobs: Sequence[Job],
    routed: Sequence[Routed],
    source: SideDescription,
    sink: SideDescription,
    options: PlanOptions,
    world: int,
) -> Filled:
    """Buckets as full as ``options`` allow, or less so that whole tensors fit besides them into two ``bucket_bytes``.
    Where whole tensors alone nearly take that much, they come on top of full buckets. ``world`` is
    the highest rank plus one. Raises PlanError when a single row of a member does not fit into a bucket."""
    limit = options.fill_bytes
    full = filled = _filled(jobs, routed, source, sink, limit, world)
    for tries_left in reversed(range(TRIES)):
        whole = busiest_layout(filled.groups, filled.buckets)
        room, taken = IN_FLIGHT * options.fill_bytes - whole.spanning, IN_FLIGHT * limit + whole.in_buckets
        if taken <= room:
            return filled
        # Bytes of whole tensors in a bucket shrink with it, those of tensors that span buckets do not.
        limit = int(limit * room / taken * MARGIN)
        if not tries_left or limit < LEAST * options.fill_bytes:
            break
        try:
            filled = _filled(jobs, routed, source, sink, limit, world)
        except PlanError:
            break
    return full


def _filled(
    jobs: Sequence[Job],
    routed: Sequence[Routed],
    source: SideDescription,
    sink: SideDescription,
    limit: int,
    world: int,
) -> Filled:
    loads = _loads(jobs, routed, limit)
    groups = tuple(_group(job, of, load, sink) for job, of, load in zip(jobs, routed, loads))
    queues = [_queue(job, load, source) for job, load in zip(jobs, loads)]
    return Filled(groups, fill_buckets(queues, limit, world))


def _loads(jobs: Sequence[Job], routed: Sequence[Routed], limit: int) -> list[TemplateLoad]:
    known: dict[int, TemplateLoad] = {}
    for job, of in zip(jobs, routed):
        if id(of.template) not in known:
            spec = job.spec
            known[id(of.template)] = template_load(of.template, job.slot_ranks, spec.shape, spec.itemsize, limit)
    return [known[id(of.template)] for of in routed]


def _queue(job: Job, load: TemplateLoad, source: SideDescription) -> Queued:
    """Direct members wait in a line per source layout. Whole ones wait in a line per set of source ranks, so that one
    is complete before the next begins."""
    spec = job.spec
    line = source.layouts[spec.src_layout].ranks if spec.whole else spec.src_layout
    return Queued(line, spec.members, prod(spec.shape) * spec.itemsize, load, job.slot_ranks)


def _group(job: Job, routed: Routed, load: TemplateLoad, sink: SideDescription) -> TransferGroup:
    spec = job.spec
    return TransferGroup(
        route=spec.route,
        shape=spec.shape,
        src_dtype=spec.src_dtype,
        dst_dtype=spec.dst_dtype,
        wire_dtype=spec.wire_dtype,
        whole=spec.whole,
        members=tuple(spec.members),
        transfers=routed.table,
        targets=sink.layouts[spec.dst_layout].ranks,
        slab_dim=load.slab_dim,
    )
