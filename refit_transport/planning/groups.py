"""Sorts parameters into groups that travel alike, and decides the dtype in which they travel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from refit_transport.layout.layout import ITEMSIZE, Entry, Layout, LogicalParameter, SideDescription
from refit_transport.layout.region import Region

from .plan import PlanError, PlanOptions, Route

FLOATS = ("float64", "float32", "bfloat16", "float16")
"""dtypes between which a refit converts. Integers, booleans, complex numbers and float8 only travel as they are."""

_NUMBERS = re.compile(r"(\d+)")


@dataclass(slots=True)
class GroupSpec:
    """A transfer group before it is routed."""

    route: Route
    shape: tuple[int, ...]
    src_dtype: str
    dst_dtype: str
    wire_dtype: str
    whole: bool
    src_layout: int
    dst_layout: int
    members: list[int] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.wire_dtype]


_HOLDS = {
    "float64": FLOATS,
    "float32": ("float32", "bfloat16", "float16"),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}
"""The floating dtypes whose every value a dtype can hold."""


def travel_order(parameters: Iterable[LogicalParameter]) -> tuple[LogicalParameter, ...]:
    """By name with numbers compared as numbers, so that layer 2 comes before layer 10."""

    def key(parameter: LogicalParameter) -> list[str | int]:
        parts: list[str | int] = list(_NUMBERS.split(parameter.name))
        parts[1::2] = map(int, parts[1::2])
        return parts

    return tuple(sorted(parameters, key=key))


def wire_dtype(name: str, source: str, sink: str, option: str) -> str:
    """The dtype in which a tensor travels. ``option`` forces one, but never one that would lose bits that both sides
    have: then the tensor travels as under ``auto``. Raises PlanError for a conversion that is not between floating
    dtypes."""
    if source == sink and (option == "auto" or source not in FLOATS):
        return source
    for dtype in (source, sink):
        if dtype not in FLOATS:
            raise PlanError(
                f"{name}: trainers hold {source}, inference ranks need {sink}; only {', '.join(FLOATS)} are converted. "
                "Store it in the same dtype on both sides"
            )
    if option != "auto" and option not in FLOATS:
        raise PlanError(f"wire_dtype {option!r}: allowed are auto, {', '.join(FLOATS)}")
    if option == "auto" or not {source, sink} & set(_HOLDS[option]):
        return source if ITEMSIZE[source] < ITEMSIZE[sink] else sink
    return option


def group_entries(
    source: SideDescription,
    sink: SideDescription,
    parameters: tuple[LogicalParameter, ...],
    options: PlanOptions,
) -> tuple[list[GroupSpec], tuple[str, ...]]:
    """Groups in order of their first member, and the names that nobody wants.

    Raises PlanError for a name that one side lacks, holds twice, or holds in another shape.
    """
    held = _by_name(source.entries)
    wanted = _wanted(sink.entries)
    index = {parameter.name: number for number, parameter in enumerate(parameters)}
    missing = [name for name in wanted if name not in held or name not in index]
    if missing:
        raise PlanError(f"inference ranks need {_some(missing)}, which no trainer holds")
    groups: dict[tuple[object, ...], GroupSpec] = {}
    disjoint: set[tuple[int, ...]] = set()
    unused = []
    for number, parameter in enumerate(parameters):
        entry = held.get(parameter.name)
        if entry is None or parameter.name not in wanted:
            unused.append(parameter.name)
            continue
        needs = wanted[parameter.name]
        if len(needs) > 1 and (layouts := tuple(need.layout for need in needs)) not in disjoint:
            _check_once(parameter.name, layouts, sink)
            disjoint.add(layouts)
        for need in needs:
            key = (entry.dtype, entry.layout, need.dtype, need.layout, need.whole)
            if key not in groups:
                groups[key] = _spec(parameter, entry, need, source, sink, options)
            groups[key].members.append(number)
    return list(groups.values()), tuple(unused)


def _spec(
    parameter: LogicalParameter,
    entry: Entry,
    need: Entry,
    source: SideDescription,
    sink: SideDescription,
    options: PlanOptions,
) -> GroupSpec:
    shape, other = source.layouts[entry.layout].shape, sink.layouts[need.layout].shape
    if shape != other or shape != parameter.shape:
        raise PlanError(f"{parameter.name}: shape {shape} on the trainers, {other} on the inference ranks")
    if need.whole:
        _check_whole(parameter, sink.layouts[need.layout])
    travels_as = wire_dtype(parameter.name, entry.dtype, need.dtype, options.wire_dtype)
    route = Route.BROADCAST if need.whole else Route.RESHARD
    return GroupSpec(route, shape, entry.dtype, need.dtype, travels_as, need.whole, entry.layout, need.layout)


def _check_once(name: str, layouts: tuple[int, ...], sink: SideDescription) -> None:
    """A parameter with several entries (direct here, whole there) must not have two on one rank."""
    seen: set[int] = set()
    for layout in layouts:
        ranks = set(sink.layouts[layout].ranks)
        if twice := seen & ranks:
            raise PlanError(f"{name}: inference rank {min(twice)} has two entries of it")
        seen |= ranks


def _check_whole(parameter: LogicalParameter, layout: Layout) -> None:
    for cell in layout.cells:
        if cell.region != Region.whole(parameter.shape):
            raise PlanError(f"{parameter.name}: wanted whole, but rank {cell.ranks[0]} lists {cell.region}")


def _by_name(entries: Iterable[Entry]) -> Mapping[str, Entry]:
    held: dict[str, Entry] = {}
    for entry in entries:
        if held.setdefault(entry.name, entry) is not entry:
            raise PlanError(f"{entry.name}: the trainers' description lists it twice")
    return held


def _wanted(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    wanted: dict[str, list[Entry]] = {}
    for entry in entries:
        wanted.setdefault(entry.name, []).append(entry)
    return wanted


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
