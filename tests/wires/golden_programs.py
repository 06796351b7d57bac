"""A golden compiler: plans and programs for a handful of ranks, straight from the contracts, slow and obvious."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from refit_transport.layout.layout import ITEMSIZE, LogicalParameter
from refit_transport.layout.region import Region
from refit_transport.planning.plan import Link, Plan, PlanOptions, Route, Slab, Transfer, TransferGroup
from refit_transport.planning.program import BucketProgram, Message, PieceTable, Program


def group(
    members: tuple[int, ...],
    shape: tuple[int, ...],
    transfers: list[Transfer],
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32"),
    whole: bool = False,
) -> TransferGroup:
    """``dtypes``: source, destination, wire."""
    route = Route.BROADCAST if whole else Route.RESHARD
    return TransferGroup(route, shape, *dtypes, whole, members, tuple(transfers))


def plan(groups: list[TransferGroup], rows_per_bucket: int, domains: tuple[tuple[int, ...], ...]) -> Plan:
    """Every bucket takes up to ``rows_per_bucket`` rows of every member of every group."""
    names = {m: (g.shape, g.src_dtype) for g in groups for m in g.members}
    parameters = tuple(LogicalParameter(f"p{m}", *names[m]) for m in sorted(names))
    most = max(g.shape[0] if g.shape else 1 for g in groups)
    buckets = []
    for start in range(0, most, rows_per_bucket):
        slabs = []
        for number, g in enumerate(groups):
            rows = g.shape[0] if g.shape else 1
            if start < rows:
                stop = min(start + rows_per_bucket, rows)
                slabs += [Slab(number, i, start, stop) for i in range(len(g.members))]
        buckets.append(tuple(slabs))
    return Plan(parameters, tuple(groups), tuple(buckets), domains, PlanOptions(), digest="d" * 64)


def compile_for(plan: Plan, rank: int) -> Program:
    table = defaultdict(list)
    origin_of: dict[tuple[int, int, int, Region], int] = {}
    last_bucket: dict[int, int] = {}
    programs = []
    dims = max(1, *(len(p.shape) for p in plan.parameters))

    def add(parameter: int, region: Region, nbytes: int, offset: int, origin: int, wanted: bool) -> int:
        pad = dims - len(region.start)
        for key, value in (
            ("parameter", parameter),
            ("start", region.start + (0,) * pad),
            ("stop", region.stop + (1,) * pad),
            ("offset", offset),
            ("nbytes", nbytes),
            ("origin", origin),
            ("wanted", wanted),
        ):
            table[key].append(value)
        return len(table["parameter"]) - 1

    for number, slabs in enumerate(plan.buckets):
        moves = list(_moves(plan, slabs))
        messages = {"recv": defaultdict(list), "send": defaultdict(list), "local": []}
        for move in moves:
            transfer, parameter, region, item = move
            if transfer.link == Link.LOCAL:
                if transfer.src == rank:
                    messages["local"].append(move)
            elif transfer.dst == rank:
                messages["recv"][transfer.hop, transfer.src].append(move)
            elif transfer.src == rank:
                messages["send"][transfer.hop, transfer.dst].append(move)
            if transfer.dst == rank and transfer.wanted:
                last_bucket[parameter] = number
        built = {"recv": [], "send": []}
        for side in ("recv", "send"):
            for (hop, peer), pieces in sorted(messages[side].items()):
                first, offset = len(table["parameter"]), 0
                for transfer, parameter, region, item in pieces:
                    origin = -1
                    if side == "send" and hop:
                        origin = origin_of[number, hop - 1, parameter, region]
                    row = add(parameter, region, region.numel * item, offset, origin, transfer.wanted)
                    if side == "recv":
                        origin_of[number, hop, parameter, region] = row
                    offset += region.numel * item
                last = len(table["parameter"])
                built[side].append(Message(peer, hop, pieces[0][0].link, offset, first, last))
        first = len(table["parameter"])
        for transfer, parameter, region, item in messages["local"]:
            add(parameter, region, region.numel * item, 0, -1, True)
        local = (first, len(table["parameter"]))
        programs.append([tuple(built["send"]), tuple(built["recv"]), local, ()])
    whole = {m: g for g in plan.groups if g.whole for m in g.members}
    for parameter, number in last_bucket.items():
        if parameter in whole:
            g = whole[parameter]
            nbytes = int(np.prod(g.shape)) * ITEMSIZE[g.dst_dtype]
            programs[number][3] += ((parameter, nbytes),)
    kinds = {"parameter": np.int32, "wanted": bool}
    names = ("parameter", "start", "stop", "offset", "nbytes", "origin", "wanted")
    columns = {name: np.array(table[name], dtype=kinds.get(name, np.int64)) for name in names}
    return Program(rank, PieceTable(**columns), tuple(BucketProgram(*p) for p in programs), plan.digest)


def _moves(plan: Plan, slabs: tuple[Slab, ...]):
    """(transfer, parameter, region, item size) of a bucket, larger items first."""
    found = []
    for slab in slabs:
        g = plan.groups[slab.group]
        item = ITEMSIZE[g.wire_dtype]
        for transfer in g.transfers:
            rows = Region((slab.start, *transfer.region.start[1:]), (slab.stop, *transfer.region.stop[1:]))
            region = transfer.region.intersect(rows) if g.shape else transfer.region
            if region is not None:
                found.append((transfer, g.members[slab.member], region, item))
    return sorted(found, key=lambda move: -move[3])
