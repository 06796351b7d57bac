"""Merges what every rank reports into one description of a side: interned layouts and one entry per parameter. Pure.

Ranks report names in groups (all names that they hold alike), because a model has tens of thousands of names and only a
few hundred distinct holdings. A group of names that many ranks report is expanded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .layout import ITEMSIZE, Entry, Layout, LogicalParameter, SideDescription
from .region import LayoutError, Region
from .sharding import region_layout


@dataclass(frozen=True, slots=True)
class Holding:
    """``names`` that one rank holds alike: same global shape, dtype, regions, and way of loading."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    regions: tuple[Region, ...]
    whole: bool = False
    """The full tensor is needed, for the model's own loader; ``regions`` is then ignored."""


def group_holdings(
    parameters: Iterable[LogicalParameter],
    regions: Mapping[str, Sequence[Region]],
    whole: frozenset[str] = frozenset(),
    dtypes: Mapping[str, str] | None = None,
) -> tuple[Holding, ...]:
    """One rank's report, from what it holds by name. ``dtypes`` overrides the parameters' own (an engine's memory)."""
    dtypes = dtypes or {}
    groups: dict[tuple[object, ...], list[str]] = {}
    for parameter in parameters:
        is_whole = parameter.name in whole
        if not is_whole and parameter.name not in regions:
            continue
        held = () if is_whole else tuple(regions[parameter.name])
        key = (parameter.shape, dtypes.get(parameter.name, parameter.dtype), held, is_whole)
        groups.setdefault(key, []).append(parameter.name)
    return tuple(Holding(tuple(names), *key) for key, names in groups.items())  # type: ignore[arg-type]


def describe(reports: Mapping[int, Sequence[Holding]]) -> SideDescription:
    """The description of a side from the reports of all its ranks, keyed by joint rank.

    A parameter that some ranks need whole and others in parts has two entries. Entries follow the order in which names
    first occur by ascending rank. Raises LayoutError for ranks that disagree about a parameter's shape or dtype, for a
    region outside it, for regions of one rank that overlap, and for a name that one rank reports twice.
    """
    blocks: dict[tuple[str, ...], list[tuple[int, Holding]]] = {}
    for rank in sorted(reports):
        for holding in reports[rank]:
            blocks.setdefault(tuple(holding.names), []).append((rank, holding))
    of_name: dict[str, list[int]] = {}
    for number, names in enumerate(blocks):
        for name in names:
            of_name.setdefault(name, []).append(number)
    reported = list(blocks.values())
    layouts: dict[Layout, int] = {}
    entries: dict[tuple[int, ...], list[tuple[str, int, bool]]] = {}
    described: list[Entry] = []
    for name, numbers in of_name.items():
        key = tuple(numbers)
        if key not in entries:
            entries[key] = _entries(name, [item for number in numbers for item in reported[number]], layouts)
        described.extend(Entry(name, dtype, layout, whole) for dtype, layout, whole in entries[key])
    return SideDescription(tuple(layouts), tuple(described))


def _entries(name: str, reported: list[tuple[int, Holding]], layouts: dict[Layout, int]) -> list[tuple[str, int, bool]]:
    """(dtype, layout number, whole) of a name, from everything that ranks report about it."""
    first_rank, first = reported[0]
    if first.dtype not in ITEMSIZE:
        raise LayoutError(
            f"{name} on rank {first_rank}: dtype {first.dtype!r} cannot be moved; known: {list(ITEMSIZE)}"
        )
    seen: dict[int, Holding] = {}
    for rank, holding in reported:
        if tuple(holding.shape) != tuple(first.shape):
            raise LayoutError(f"{name}: shape {first.shape} on rank {first_rank}, {holding.shape} on rank {rank}")
        if holding.dtype != first.dtype:
            raise LayoutError(f"{name}: dtype {first.dtype} on rank {first_rank}, {holding.dtype} on rank {rank}")
        if rank in seen:
            raise LayoutError(f"{name}: rank {rank} reports it twice")
        seen[rank] = holding
    found = []
    for whole in (False, True):
        full = (Region.whole(first.shape),)
        held = {rank: full if whole else holding.regions for rank, holding in seen.items() if holding.whole == whole}
        if held:
            layout = region_layout(first.shape, held, name)
            found.append((first.dtype, layouts.setdefault(layout, len(layouts)), whole))
    return found
