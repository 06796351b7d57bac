"""A study as plain data: what `refit-transport plan --json` prints, and what the page is drawn from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from refit_transport.planning.cost import PHASES
from refit_transport.planning.plan import Link, Route

from .plan_study import Job, Outcome, Study

SCHEMA = 1
"""Rises when a key changes its meaning or goes away."""
LINKS = {"network": Link.NETWORK, "in_domain": Link.DOMAIN, "local": Link.LOCAL}
PATHS = {"reshard": Route.RESHARD, "broadcast": Route.BROADCAST}
BUSIEST = 6
TIMELINE_BINS = 160


def summary(study: Study) -> dict[str, Any]:
    """Figures of the whole study. Sizes are bytes, times seconds."""
    job = study.job
    transports: dict[str, dict[str, Any]] = {}
    for outcome in study.outcomes:
        transports.setdefault(outcome.transport, {})[outcome.scope] = _figures(study, outcome)
    return {
        "schema": SCHEMA,
        "model": {"name": job.model.name, "source": job.model.source, "assumed": list(job.model.assumed),
                  "tensors": len(job.model.tensors), "bytes": job.model.nbytes},
        "train": {"layout": str(job.training), "ranks": job.training.world, **asdict(job.training)},
        "gen": {"layout": str(job.generation), "ranks": job.generation.world, **asdict(job.generation)},
        "colocated": job.colocated,
        "cluster": asdict(job.cluster) | {"assumed": list(job.cluster.assumed)},
        "plan_seconds": study.main.plan_seconds,
        "digest": study.main.plan.digest,
        "bound_seconds": study.bound.seconds,
        "bound": {**asdict(study.bound), "limited_by": study.bound.limit},
        "transports": transports,
        "assumptions": list(study.assumptions),
    }  # fmt: skip


def page_data(study: Study) -> dict[str, Any]:
    """``summary`` plus what only the page shows: heat maps and time lines, in the order in which to show outcomes."""
    data = summary(study)
    data["order"] = [[outcome.transport, outcome.scope] for outcome in study.outcomes]
    for outcome in study.outcomes:
        shown = data["transports"][outcome.transport][outcome.scope]
        shown["title"] = outcome.title
        shown["heat"] = heat_map(study.job, outcome)
        shown["timeline"] = timeline(outcome)
    return data


def heat_map(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Bytes from block to block of consecutive ranks: rows send, columns receive, blocks that do neither left out."""
    traffic = outcome.prediction.traffic
    total = sum(traffic.pairs.values(), np.zeros(1))
    rows, columns = np.flatnonzero(total.sum(1)), np.flatnonzero(total.sum(0))
    cells = [
        [r, c, *(round(float(traffic.pairs[link][row, column])) for link in LINKS.values())]
        for r, row in enumerate(rows)
        for c, column in enumerate(columns)
        if total[row, column] > 0
    ]
    size = int((traffic.block_of == 0).sum())
    return {
        "block_ranks": size,
        "rows": [_block(job, traffic.block_of, row) for row in rows],
        "columns": [_block(job, traffic.block_of, column) for column in columns],
        "links": list(LINKS),
        "cells": cells,
    }


def timeline(outcome: Outcome) -> dict[str, Any]:
    """Spans of every phase, [start, end, busy seconds]; consecutive buckets share a span when there are many."""
    spans = outcome.prediction.timeline
    per_bin = -(-len(spans) // TIMELINE_BINS) if len(spans) else 1
    lanes: dict[str, list[list[float]]] = {}
    for number, phase in enumerate(PHASES):
        lane = [spans[first : first + per_bin, number] for first in range(0, len(spans), per_bin)]
        busy = [float((part[:, 1] - part[:, 0]).sum()) for part in lane]
        lanes[phase] = [[_short(part[0, 0]), _short(part[-1, 1]), _short(seconds)]
                        for part, seconds in zip(lane, busy, strict=True) if seconds > 0]  # fmt: skip
    return {"buckets_per_span": per_bin, "lanes": lanes}


def place_of(job: Job, rank: int) -> str:
    """What a joint rank is: ``trainer 12 (pp 0, ep 12)`` or ``engine 3, tp 1``."""
    if rank in job.generators:
        sizes, local = job.generation, rank - job.generators.start
        engine, inside = divmod(local, sizes.tp * sizes.pp)
        stage = f", pp {inside // sizes.tp}" if sizes.pp > 1 else ""
        name = f"engine {engine}{stage}, tp {inside % sizes.tp}"
        return f"rank {rank}: {name}" + (" and trainer" if rank in job.trainers else "")
    sizes = job.training
    if sizes.fsdp:
        where = [f"fsdp {rank // sizes.tp % sizes.fsdp}"]
    else:
        stage_ranks = sizes.tp * sizes.cp * sizes.replicas
        where = [f"pp {rank // stage_ranks}"] if sizes.pp > 1 else []
        if sizes.ep > 1:
            where.append(f"ep {rank % stage_ranks // sizes.expert_tp % sizes.ep}")
    if sizes.tp > 1:
        where.append(f"tp {rank % sizes.tp}")
    return f"rank {rank}: trainer" + (f" {', '.join(where)}" if where else "")


def _figures(study: Study, outcome: Outcome) -> dict[str, Any]:
    p, traffic = outcome.prediction, outcome.prediction.traffic
    out, into = (traffic.total(table) for table in traffic.of_link(Link.NETWORK))
    return {
        "predicted_seconds": p.seconds,
        "bound_seconds": study.bound.seconds,
        "bound_share": study.bound.seconds / p.seconds if p.seconds else 1.0,
        "phases": p.phase_seconds,
        "bytes": {"network": p.network_bytes, "in_domain": p.domain_bytes, "local": p.local_bytes},
        "bytes_by_path": {
            path: {name: round(traffic.by_route.get((route, link), 0.0)) for name, link in LINKS.items()}
            | {"tensors": traffic.tensors_by_route.get(route, 0)}
            for path, route in PATHS.items()
        },
        "busiest_send_over_mean": p.busiest_send_over_mean,
        "busiest_recv_over_mean": p.busiest_recv_over_mean,
        "busiest_senders": _busiest(study.job, out),
        "busiest_receivers": _busiest(study.job, into),
        "messages": p.messages,
        "buckets": p.buckets,
        "peak_extra_bytes_per_rank": p.peak_extra_bytes_per_rank,
        "limited_by": p.limited_by,
        "plan_seconds": outcome.plan_seconds,
        "digest": outcome.plan.digest,
    }


def _busiest(job: Job, nbytes: np.ndarray) -> list[dict[str, Any]]:
    order = np.argsort(-nbytes, kind="stable")[:BUSIEST]
    return [{"rank": int(rank), "place": place_of(job, int(rank)), "network_bytes": round(float(nbytes[rank]))}
            for rank in order if nbytes[rank] > 0]  # fmt: skip


def _block(job: Job, block_of: np.ndarray, block: int) -> dict[str, Any]:
    """First and last rank of a block and which side it is on."""
    ranks = np.flatnonzero(block_of == block)
    first, last = int(ranks[0]), int(ranks[-1])
    trainers, generators = first in job.trainers, last in job.generators
    side = "both" if trainers and generators else "trainer" if trainers else "engine"
    return {"first": first, "last": last, "side": side}


def _short(value: float) -> float:
    """Six significant digits: enough for a drawing, and half the page."""
    return float(f"{value:.6g}")
