"""Layouts: which rank holds which regions of a logical parameter, shared by all parameters laid out alike.

A model of tens of thousands of tensors on hundreds of ranks has only a few hundred distinct layouts, so a side is
described by its layouts and, per parameter, the number of its layout. Ranks are *joint* ranks: trainers and inference
ranks are numbered in one world, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .region import Region

ITEMSIZE = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes per element of every dtype that can be moved, by the name torch prints after ``torch.``. An element of
``float4_e2m1fn_x2`` is a pair of numbers."""


@dataclass(frozen=True, slots=True)
class LogicalParameter:
    """A tensor of the Hugging Face checkpoint: its name, global shape and dtype (``"bfloat16"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One region and the ranks that hold all of it, ascending. Several ranks are replicas of each other."""

    region: Region
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Every cell of a parameter of ``shape``, in ascending order. Cells of different ranks may overlap; the regions of
    one rank may not. A rank in no cell holds nothing of the parameter."""

    shape: tuple[int, ...]
    cells: tuple[Cell, ...]

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        return tuple(cell.region for cell in self.cells if rank in cell.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for cell in self.cells for rank in cell.ranks}))


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter as one side stores it: its name, the dtype in that side's memory, and the number of its layout."""

    name: str
    dtype: str
    layout: int
    whole: bool = False
    """Inference side only: every rank of the layout needs the full tensor, for the model's own loader."""


@dataclass(frozen=True, slots=True)
class SideDescription:
    """What all ranks of one side (trainers, or inference ranks) hold."""

    layouts: tuple[Layout, ...]
    entries: tuple[Entry, ...]

    def layout_of(self, entry: Entry) -> Layout:
        return self.layouts[entry.layout]
