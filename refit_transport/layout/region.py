"""A region is a box inside a logical parameter: the unit in which both sides say what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


class LayoutError(ValueError):
    """Holdings that contradict themselves or each other: names the parameter, the region and the ranks."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Half-open box ``[start[d], stop[d])`` per dimension of a logical parameter.

    A 0-D parameter has the region ``Region((), ())`` with one element. A region with ``start == stop`` in any
    dimension is empty.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """The region that covers a parameter of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def empty(self) -> bool:
        return any(a >= b for a, b in zip(self.start, self.stop))

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None when the two share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(a >= b for a, b in zip(start, stop)) else Region(start, stop)

    def contains(self, other: Region) -> bool:
        return all(a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop))

    def relative_to(self, origin: Region) -> Region:
        """This region in coordinates whose zero is ``origin.start``."""
        return Region(
            tuple(a - o for a, o in zip(self.start, origin.start)),
            tuple(b - o for b, o in zip(self.stop, origin.start)),
        )

    def slices(self) -> tuple[slice, ...]:
        """Index that selects the region from a tensor of the parameter's shape."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop)) + "]"
