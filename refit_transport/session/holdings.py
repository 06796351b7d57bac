"""Reports of what a member holds or needs, in grouped form, as plain data for the control connection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from refit_transport.engines.base import SinkDescription
from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region
from refit_transport.trainers.base import WeightSource

from .errors import HandshakeError

Box = tuple[tuple[int, ...], tuple[int, ...]]


class HoldingGroup(msgspec.Struct, frozen=True):
    """Parameters that this member holds alike: same global shape, dtype in its memory, and regions."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    members: list[int]
    """Indices into the report's names."""
    whole: bool = False

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(tuple(start), tuple(stop)) for start, stop in self.boxes)


class SideReport(msgspec.Struct, frozen=True):
    """One member's whole report. Trainers say what they hold, inference ranks what they need."""

    names: list[str]
    """Checkpoint names in travel order."""
    groups: list[HoldingGroup]
    reasons: dict[str, str] = {}
    """Inference side: names asked to go shard to shard that take the loader's way, and why."""
    left_out: list[str] = []
    """Inference side: tensors of the draft model that keep their values."""


EMPTY = SideReport([], [])


def report_source(source: WeightSource) -> SideReport:
    """A trainer rank's report, in the order in which the source lists its parameters."""
    holdings = source.holdings()
    return _grouped((p, holdings[p.name], p.dtype, False) for p in source.parameters())


def report_sink(description: SinkDescription, parameters: Sequence[LogicalParameter]) -> SideReport:
    """An inference rank's report, in travel order."""

    def rows():
        for p in parameters:
            if p.name in description.direct:
                yield p, description.direct[p.name], description.dtypes[p.name], False
            if p.name in description.whole:
                yield p, (Region.whole(p.shape),), description.dtypes.get(p.name, p.dtype), True

    return _grouped(rows(), dict(description.reasons), sorted(description.left_out))


def _grouped(rows: Iterable, reasons: dict[str, str] | None = None, left_out: list[str] | None = None) -> SideReport:
    names: dict[str, int] = {}
    groups: dict[tuple, list[int]] = {}
    for parameter, regions, dtype, whole in rows:
        boxes = tuple((r.start, r.stop) for r in regions)
        member = names.setdefault(parameter.name, len(names))
        groups.setdefault((parameter.shape, dtype, boxes, whole), []).append(member)
    listed = [HoldingGroup(shape, dtype, boxes, ids, whole) for (shape, dtype, boxes, whole), ids in groups.items()]
    return SideReport(list(names), listed, reasons or {}, left_out or [])


def merge_parameters(reports: Sequence[SideReport]) -> list[LogicalParameter]:
    """All checkpoint tensors that any trainer rank holds, in travel order: each rank's own, lower ranks first. Raises
    HandshakeError when two ranks disagree on a shape or dtype."""
    known: dict[str, tuple[LogicalParameter, int]] = {}
    for rank, report in enumerate(reports):
        own = {
            report.names[member]: LogicalParameter(report.names[member], tuple(group.shape), group.dtype)
            for group in report.groups
            for member in group.members
        }
        for name in report.names:
            held, holder = known.setdefault(name, (own[name], rank))
            if held != own[name]:
                raise HandshakeError(
                    f"{name}: trainer rank {holder} holds {held.shape} {held.dtype}, "
                    f"trainer rank {rank} holds {own[name].shape} {own[name].dtype}"
                )
    return [parameter for parameter, _ in known.values()]
