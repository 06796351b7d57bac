"""A device mesh: joint ranks arranged in a named n-dimensional grid, as in PyTorch DTensor. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from .region import LayoutError


@dataclass(frozen=True, slots=True)
class Mesh:
    """``ranks`` in row-major order over ``shape``; any numbering is allowed as long as no rank occurs twice."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    """One name per mesh dimension, or none at all."""

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or not self.shape:
            raise LayoutError(f"mesh of shape {self.shape} needs {prod(self.shape)} ranks, got {len(self.ranks)}")
        if len(set(self.ranks)) != len(self.ranks):
            raise LayoutError(f"mesh of shape {self.shape} lists a rank twice: {self.ranks}")
        if self.names and len(self.names) != len(self.shape):
            raise LayoutError(f"mesh of shape {self.shape} has {len(self.names)} dimension names: {self.names}")

    @classmethod
    def arange(cls, shape: Sequence[int], first: int = 0, names: Sequence[str] = ()) -> Mesh:
        """Ranks ``first, first + 1, ...`` in row-major order."""
        return cls(tuple(shape), tuple(range(first, first + prod(shape))), tuple(names))

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every (rank, coordinate), in row-major order."""
        for position, rank in enumerate(self.ranks):
            yield rank, self._coordinate(position)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Raises LayoutError for a rank outside the mesh."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in the mesh with ranks {self.ranks}")
        return self._coordinate(self.ranks.index(rank))

    def _coordinate(self, position: int) -> tuple[int, ...]:
        coordinate = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))
