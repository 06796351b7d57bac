"""How one mesh dimension treats a tensor: the DTensor placements as plain data. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .region import LayoutError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the mesh dimension holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dimension ``dim`` (negative counts from the end) is cut as ``torch.chunk`` cuts."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Tensor dimension ``dim`` is cut into ``split_factor`` parts, and each of these along the mesh dimension."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


def from_torch(placements: Iterable[object]) -> tuple[Placement, ...]:
    """DTensor placements as this module's. Looks at type names, because torch's ``_StridedShard`` is no subclass of its
    ``Shard`` and answers False to ``is_shard()``. Raises LayoutError for ``Partial``: it must be reduced first."""
    return tuple(_from_torch(placement) for placement in placements)


def _from_torch(placement: object) -> Placement:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(placement.dim)  # type: ignore[attr-defined]
    if kind in ("_StridedShard", "StridedShard"):
        return StridedShard(placement.dim, placement.split_factor)  # type: ignore[attr-defined]
    raise LayoutError(f"placement {placement!r} cannot be sent: use Replicate, Shard or _StridedShard (reduce Partial)")
