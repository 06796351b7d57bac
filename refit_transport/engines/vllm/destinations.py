"""Turns a recording of the model's loaders into what one rank needs: direct regions, whole tensors, nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from refit_transport.engines.base import SinkDescription
from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region

from .recorder import Copy, Recording, Zero
from .strided import Landing, Strided, landings, overlapping

NOT_WEIGHTS = re.compile(
    r"(^|\.)(cos_sin_cache|inv_freq|_?[qkv]_scale|_?prob_scale|_?[qkv]_zero_point|_[qkv]_scale_float|_?k?v?_range)$"
)
"""Tensors that no checkpoint tensor may have to write: rotary caches, and scales of the KV cache."""


@dataclass(slots=True)
class Destinations:
    """Where every checkpoint tensor goes on this rank."""

    direct: dict[str, tuple[tuple[str, Landing], ...]] = field(default_factory=dict)
    """Name to (path of the model's tensor, landing)."""
    replays: dict[str, tuple[Copy, ...]] = field(default_factory=dict)
    """Names that arrive whole and are copied as recorded."""
    loads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that arrive whole and go through the loader, with the paths of the tensors they may change."""
    ignored: set[str] = field(default_factory=set)
    dtypes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    zeros: tuple[Zero, ...] = ()
    padded: set[str] = field(default_factory=set)
    """Paths of tensors with elements that no copy writes."""

    def paths(self, name: str) -> set[str]:
        """Paths of the model's tensors that ``name`` writes."""
        if name in self.direct:
            return {path for path, _ in self.direct[name]}
        return {c.tensor for c in self.replays[name]} if name in self.replays else set(self.loads.get(name, ()))

    def description(self) -> SinkDescription:
        return SinkDescription(
            direct={name: tuple(landing.region for _, landing in found) for name, found in self.direct.items()},
            whole=frozenset(self.replays) | frozenset(self.loads),
            ignored=frozenset(self.ignored),
            dtypes=dict(self.dtypes),
            reasons=dict(self.reasons),
        )


def destinations(
    recording: Recording,
    parameters: Sequence[LogicalParameter],
    direct: frozenset[str],
    required: Mapping[str, int],
) -> Destinations:
    """Decide for each of ``parameters`` how it reaches the model. ``required`` gives the elements that must be written
    per tensor path. Raises ValueError that names what is unwritten, and what is written twice."""
    result = Destinations(zeros=tuple(recording.zeros))
    copies: dict[str, list[Copy]] = defaultdict(list)
    for copy in dict.fromkeys(recording.copies):
        copies[copy.name].append(copy)
    inexact, computed = _computed(recording, copies)
    for parameter in parameters:
        name, found = parameter.name, tuple(copies.get(parameter.name, ()))
        if name in computed:
            paths = {c.tensor for c in found} | {path for path in inexact if name in inexact[path][0]}
            result.loads[name] = tuple(sorted(paths))
            result.dtypes[name] = _dtype(recording, paths) or parameter.dtype
            reason: str | None = computed[name]
        elif not found:
            result.ignored.add(name)
            continue
        else:
            result.dtypes[name] = _dtype(recording, {c.tensor for c in found}) or parameter.dtype
            regions, reason = _regions(recording, found, parameter.shape) if name in direct else (None, None)
            if regions is None:
                result.replays[name] = found
            else:
                result.direct[name] = regions
        if name in direct and reason:
            result.reasons[name] = reason
    _check_written(recording, copies, inexact, required, result)
    return result


def _computed(
    recording: Recording, copies: Mapping[str, Sequence[Copy]]
) -> tuple[dict[str, tuple[set[str], str]], dict[str, str]]:
    """Tensors with a computed part (names they depend on, reason); names that must take the loader's way (reason)."""
    inexact: dict[str, tuple[set[str], str]] = {}
    names: dict[str, str] = {}
    for item in recording.computed:
        if item.tensor is not None:
            inexact.setdefault(item.tensor, (set(), item.reason))[0].update(item.names)
        names.update((name, item.reason) for name in item.names)
    for name, found in copies.items():
        for copy in found:
            if copy.tensor in inexact:
                inexact[copy.tensor][0].add(name)
                names[name] = inexact[copy.tensor][1]
    return inexact, names


def _dtype(recording: Recording, paths: set[str]) -> str | None:
    """The widest dtype of the tensors at ``paths``."""
    widest: torch.dtype | None = None
    for path in sorted(paths):
        dtype = recording.formats[path][1]
        widest = dtype if widest is None else torch.promote_types(widest, dtype)
    return None if widest is None else str(widest).removeprefix("torch.")


def _regions(
    recording: Recording, copies: Sequence[Copy], shape: tuple[int, ...]
) -> tuple[tuple[tuple[str, Landing], ...] | None, str | None]:
    """The landings of ``copies``, or None and why they cannot be written directly."""
    found: list[tuple[str, Landing]] = []
    for copy in copies:
        boxes = landings(copy.source, copy.target, shape)
        if boxes is None:
            return None, f"{copy.tensor} takes a part of it that is not a box"
        found += [(copy.tensor, box) for box in boxes]
    if len({recording.formats[path][1] for path, _ in found}) > 1:
        return None, "it lands in tensors of different dtypes"
    if overlapping([box.region for _, box in found]):
        return None, "the same elements land in several places of this rank"
    return tuple(found), None


def _check_written(
    recording: Recording,
    copies: Mapping[str, Sequence[Copy]],
    inexact: Mapping[str, object],
    required: Mapping[str, int],
    result: Destinations,
) -> None:
    written: dict[str, list[tuple[str, Region | None, int]]] = defaultdict(list)
    for found in copies.values():
        for copy in found:
            for region, count in _boxes(copy.target, copy.source, recording.formats[copy.tensor][0]):
                written[copy.tensor].append((copy.name, region, count))
    zeros: dict[str, list[Zero]] = defaultdict(list)
    for zero in recording.zeros:
        zeros[zero.tensor].append(zero)
    missing, doubled = [], []
    for path, needed in required.items():
        boxes = [(name, region) for name, region, _ in written[path] if region is not None]
        if path not in inexact and (pair := overlapping([region for _, region in boxes])):
            doubled.append(f"{path} (by {boxes[pair[0]][0]} and {boxes[pair[1]][0]})")
        count = sum(count for _, _, count in written[path])
        count += sum(
            _uncovered(zero, [region for _, region in boxes], recording.formats[path][0]) for zero in zeros[path]
        )
        if count < _numel(recording.formats[path][0]):
            result.padded.add(path)
        if count < needed and path not in inexact and not NOT_WEIGHTS.search(path):
            missing.append(f"{path} ({count} of {needed} elements)")
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of the engine would be written by nobody: {', '.join(sorted(missing))}"
        )
    if doubled:
        raise ValueError(f"{len(doubled)} tensors of the engine would be written twice: {', '.join(sorted(doubled))}")


def _boxes(view: Strided, other: Strided, shape: tuple[int, ...]) -> list[tuple[Region | None, int]]:
    found = landings(view, other, shape)
    return [(None, view.numel)] if found is None else [(box.region, box.region.numel) for box in found]


def _uncovered(zero: Zero, regions: Sequence[Region], shape: tuple[int, ...]) -> int:
    """Elements of ``zero`` outside ``regions``."""
    count = 0
    for box, size in _boxes(zero.target, zero.target, shape):
        shared = (box.intersect(region) for region in regions) if box is not None else ()
        count += size - sum(common.numel for common in shared if common is not None)
    return max(count, 0)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
