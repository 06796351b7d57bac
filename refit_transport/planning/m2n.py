"""Which transfer groups NCCL M2N can carry, as which meshes, and how equal ones are stacked into one call; pure.

M2N moves one tensor from a source mesh to a destination mesh. A mesh is an interval of ranks in one or two axes, of
which at most one cuts the tensor, into equal shards. Dimensions that no side cuts merge with their neighbours, so every
such tensor has at most three: what lies before the first cut (members are stacked there), from the first cut to the
second, and from the second on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from refit_transport.layout.layout import ITEMSIZE, Layout
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import region_layout

from .plan import Plan, Route, Slab, TransferGroup
from .staged import staged_bytes
from .whole import busiest_layout

DTYPES = frozenset(
    "int8 uint8 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()
)
"""What M2N moves, by the name torch prints after ``torch.``."""

MAX_SOURCES = 16
"""Source shards that one destination shard may be put together from."""
MAX_TARGETS = 64
"""Destination shards that one source shard may be cut into."""
MAX_CALL_BYTES = 2 << 30
"""Most bytes of one rank in one call: what M2N stages in by default."""


class Inexpressible(ValueError):
    """M2N cannot carry this; the text says why."""


@dataclass(frozen=True, slots=True)
class SideMesh:
    """One side of a call, in ranks of M2N's communicator."""

    start: int
    dims: tuple[int, ...]
    axis: int | None = None
    """The mesh axis that cuts the tensor; None: every rank holds all of it."""
    dim: int | None = None
    """The dimension that it cuts."""

    @property
    def ranks(self) -> range:
        return range(self.start, self.start + prod(self.dims))

    @property
    def shards(self) -> int:
        return 1 if self.axis is None else self.dims[self.axis]


@dataclass(frozen=True, slots=True)
class Geometry:
    """A call for one member: its merged global shape, dtype and meshes. No side cuts dimension 0."""

    shape: tuple[int, ...]
    dtype: str
    source: SideMesh
    sink: SideMesh

    def local_shape(self, side: SideMesh, members: int = 1) -> tuple[int, ...]:
        """Of a rank's buffer for ``members`` stacked members."""
        local = list(self.shape)
        if side.dim is not None:
            local[side.dim] //= side.shards
        return (local[0] * members, *local[1:])

    @property
    def nbytes(self) -> int:
        """Of one member on the rank that holds most of it."""
        return max(prod(self.local_shape(side)) for side in (self.source, self.sink)) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Choice:
    """The wire of one transfer group, and why: ``geometry`` is None when it goes point to point."""

    wire: str
    reason: str
    geometry: Geometry | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """One call: members (indices into ``Plan.parameters``) of equal geometry, one after the other in dimension 0."""

    geometry: Geometry
    members: tuple[int, ...]
    groups: tuple[int, ...]
    """The plan's group of each member: their shapes may differ, and a parameter may be in several groups."""


def communicator_order(trainers: Sequence[int], engines: Sequence[int]) -> dict[int, int]:
    """Joint rank to rank in M2N's communicator: sources first, as its fast path inside a domain asks for."""
    ordered = [*sorted(trainers), *sorted(set(engines) - set(trainers))]
    return {rank: place for place, rank in enumerate(ordered)}


def choose_wires(
    plan: Plan, sources: Sequence[Layout | None], place: Mapping[int, int], refused: Mapping[int, str] | None = None
) -> list[Choice]:
    """One choice per group of the plan. ``sources`` are the groups' source layouts, None where nobody asked for one;
    ``place`` as ``communicator_order`` gives it; ``refused`` gives the reason for groups that must not go over M2N.
    Deterministic: equal arguments, equal choices on every rank."""
    refused = refused or {}
    limit = min(plan.options.bucket_bytes, MAX_CALL_BYTES)
    while True:
        choices = [
            Choice("nccl", refused[number]) if number in refused else _choice(group, source, place, limit)
            for number, (group, source) in enumerate(zip(plan.groups, sources, strict=True))
        ]
        largest = max((choice.geometry.nbytes for choice in choices if choice.geometry is not None), default=0)
        limit = call_limit(plan, choices)
        if largest <= limit:
            return choices


def call_limit(plan: Plan, choices: Sequence[Choice]) -> int:
    """Most bytes of one rank in one call. The library stages as much again, and what goes point to point is staged in
    the same memory as the calls, so that a rank takes two ``bucket_bytes`` at most, whole tensors included if the plan
    keeps them within that."""
    budget, whole = 2 * plan.options.bucket_bytes, busiest_layout(plan.groups, plan.buckets).nbytes
    if staged_bytes(plan) + whole <= budget:
        budget -= whole
    return max(0, min(budget // 2, MAX_CALL_BYTES, budget - staged_bytes(without_m2n(plan, choices))))


def wires_by_parameter(plan: Plan, choices: Sequence[Choice]) -> dict[str, tuple[str, str]]:
    """Parameter name to its wire and the reason."""
    return {
        plan.parameters[member].name: (choice.wire, choice.reason)
        for group, choice in zip(plan.groups, choices, strict=True)
        for member in group.members
    }


def make_stacks(plan: Plan, choices: Sequence[Choice]) -> list[Stack]:
    """The calls of a refit in the order in which every rank makes them: that of each stack's first member."""
    alike: dict[Geometry, list[tuple[int, int]]] = {}
    for number, (group, choice) in enumerate(zip(plan.groups, choices, strict=True)):
        if choice.geometry is not None:
            alike.setdefault(choice.geometry, []).extend((member, number) for member in group.members)
    stacks, limit = [], call_limit(plan, choices)
    for geometry, pairs in alike.items():
        depth = max(1, limit // geometry.nbytes)
        pairs.sort()
        stacks += [Stack(geometry, *zip(*pairs[i : i + depth])) for i in range(0, len(pairs), depth)]
    return sorted(stacks, key=lambda stack: (stack.members[0], stack.groups[0]))


def without_m2n(plan: Plan, choices: Sequence[Choice]) -> Plan:
    """The part of the plan that goes point to point."""
    number = {}
    for index, choice in enumerate(choices):
        if choice.geometry is None:
            number[index] = len(number)
    buckets = [
        tuple(Slab(number[s.group], s.member, s.start, s.stop) for s in bucket if s.group in number)
        for bucket in plan.buckets
    ]
    return Plan(
        plan.parameters,
        tuple(plan.groups[index] for index in number),
        tuple(bucket for bucket in buckets if bucket),
        plan.domains,
        plan.options,
        f"{plan.digest} without m2n",
        plan.unused,
    )


def is_candidate(group: TransferGroup) -> bool:
    """Whether the group's source layout is worth asking for."""
    return group.route is Route.RESHARD and not group.whole and bool(len(group.transfers))


def sink_layout(group: TransferGroup) -> Layout:
    """What each destination rank stores: the box around what it is sent, or the single pieces if they do not fill
    it."""
    held: dict[int, list[Region]] = {}
    for transfer in group.transfers:
        if transfer.wanted:
            held.setdefault(transfer.dst, []).append(transfer.region)
    return region_layout(group.shape, {rank: _joined(regions) for rank, regions in held.items()})


def _joined(regions: list[Region]) -> list[Region]:
    box = Region(tuple(map(min, zip(*(r.start for r in regions)))), tuple(map(max, zip(*(r.stop for r in regions)))))
    return [box] if box.numel == sum(r.numel for r in regions) else regions


def _choice(group: TransferGroup, source: Layout | None, place: Mapping[int, int], limit: int) -> Choice:
    try:
        if not is_candidate(group) or source is None:
            raise Inexpressible("whole tensors, for the model's own loader")
        if not group.shape:
            raise Inexpressible("a scalar")
        geometry = express(source, sink_layout(group), group.wire_dtype, place)
        if geometry.nbytes > limit:
            raise Inexpressible(
                f"one rank holds {geometry.nbytes} bytes of it, more than the {limit} for a call that "
                "`bucket_bytes` leaves"
            )
    except Inexpressible as reason:
        return Choice("nccl", str(reason))
    return Choice("nccl_m2n", _described(geometry), geometry)


def _described(geometry: Geometry) -> str:
    sides = (f"{side.shards} shards on {len(side.ranks)} ranks" for side in (geometry.source, geometry.sink))
    return " to ".join(sides)


def express(source: Layout, sink: Layout, dtype: str, place: Mapping[int, int]) -> Geometry:
    """The call that takes a tensor from ``source`` to ``sink``. Raises Inexpressible."""
    if dtype not in DTYPES:
        raise Inexpressible(f"dtype {dtype} is not one that M2N moves")
    if both := sorted(set(source.ranks) & set(sink.ranks)):
        raise Inexpressible(f"rank {both[0]} is on both sides")
    meshes = _mesh(source, place, "source"), _mesh(sink, place, "destination")
    if meshes[0].start > meshes[1].start:
        raise Inexpressible("the destinations come before the sources")
    _check_fan(*meshes)
    cuts = sorted({mesh.dim for mesh in meshes if mesh.dim is not None})
    edges = [0, *cuts, len(source.shape)]
    shape = tuple(prod(source.shape[a:b]) for a, b in pairwise(edges))
    merged = {dim: 1 + number for number, dim in enumerate(cuts)}
    source_mesh, sink_mesh = (SideMesh(m.start, m.dims, m.axis, merged.get(m.dim)) for m in meshes)
    return Geometry(shape, dtype, source_mesh, sink_mesh)


def _mesh(layout: Layout, place: Mapping[int, int], side: str) -> SideMesh:
    """The side as a mesh, ``dim`` in dimensions of the layout."""
    places = sorted(place[rank] for rank in layout.ranks)
    if len(places) != sum(len(cell.ranks) for cell in layout.cells):
        raise Inexpressible(f"a {side} rank holds several regions")
    start = places[0]
    if places[-1] - start + 1 != len(places):
        raise Inexpressible(f"the {side} ranks are no interval of the communicator")
    dim = _cut_dim(layout, side)
    if dim is None:
        return SideMesh(start, (len(places),))
    cells = sorted(layout.cells, key=lambda cell: cell.region.start[dim])
    held = [sorted(place[rank] - start for rank in cell.ranks) for cell in cells]
    shards, replicas = len(cells), len(held[0])
    if held == [[shard + r * shards for r in range(replicas)] for shard in range(shards)]:
        return SideMesh(start, (shards,), 0, dim) if replicas == 1 else SideMesh(start, (replicas, shards), 1, dim)
    if held == [[shard * replicas + r for r in range(replicas)] for shard in range(shards)]:
        return SideMesh(start, (shards, replicas), 0, dim)
    raise Inexpressible(f"the {side} ranks are not in the order of a mesh of {shards} shards")


def _cut_dim(layout: Layout, side: str) -> int | None:
    """The dimension that cuts the tensor into equal shards, None when every rank holds all of it."""
    cut = {
        dim
        for cell in layout.cells
        for dim, extent in enumerate(layout.shape)
        if (cell.region.start[dim], cell.region.stop[dim]) != (0, extent)
    }
    if not cut:
        return None
    if len(cut) > 1:
        raise Inexpressible(f"the {side} cuts dimensions {', '.join(map(str, sorted(cut)))}; M2N allows one")
    (dim,) = cut
    edges = sorted((cell.region.start[dim], cell.region.stop[dim]) for cell in layout.cells)
    extent, uneven = divmod(layout.shape[dim], len(edges))
    if uneven or edges != [(i * extent, (i + 1) * extent) for i in range(len(edges))]:
        raise Inexpressible(f"the {side} shards of dimension {dim} are not equal parts of {layout.shape[dim]}")
    return dim


def _check_fan(source: SideMesh, sink: SideMesh) -> None:
    """Shards of one side that meet one shard of the other."""
    same = source.dim == sink.dim
    sources = -(-source.shards // sink.shards) if same else source.shards
    targets = -(-sink.shards // source.shards) if same else sink.shards
    if same and max(source.shards, sink.shards) % min(source.shards, sink.shards):
        sources, targets = sources + 1, targets + 1
    if sources > MAX_SOURCES:
        raise Inexpressible(f"{sources} source shards meet one destination shard; M2N allows {MAX_SOURCES}")
    if targets > MAX_TARGETS:
        raise Inexpressible(f"{targets} destination shards meet one source shard; M2N allows {MAX_TARGETS}")
