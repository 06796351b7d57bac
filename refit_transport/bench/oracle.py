"""Contents that tell themselves apart: a hash of (tensor, version, global index), so that no wrong shard can pass."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod

import torch

from refit_transport.layout.region import Region

BLOCK_ELEMENTS = 1 << 17
"""Rows are hashed in blocks of about this many elements, which stay in the processor's cache."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fill(target: torch.Tensor, name: str, region: Region, shape: tuple[int, ...], version: int) -> None:
    """Write the contents of ``region`` of the tensor ``name`` [``shape``] at ``version`` into contiguous ``target``."""
    rows = target.view(_rows(region), -1)
    for first, values in _blocks(name, region, shape, version):
        rows[first : first + len(values)].copy_(_as_dtype(values, target.dtype))


def matches(actual: torch.Tensor, name: str, region: Region, shape: tuple[int, ...], version: int) -> bool:
    """Whether contiguous ``actual`` holds exactly those contents, bit by bit."""
    bits = _BITS[actual.element_size()]
    rows = actual.view(bits).view(_rows(region), -1)
    return all(
        torch.equal(rows[first : first + len(values)], _as_dtype(values, actual.dtype).view(bits))
        for first, values in _blocks(name, region, shape, version)
    )


def _blocks(name: str, region: Region, shape: tuple[int, ...], version: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, int32 hashes [rows, columns]) of a region whose leading dimensions are flattened to rows."""
    start, stop = region.start or (0,), region.stop or (1,)
    columns = torch.arange(start[-1], stop[-1], dtype=torch.int32)
    leading = torch.zeros(1, dtype=torch.int32)
    for first, last, size in zip(start[:-1], stop[:-1], shape[:-1], strict=True):
        leading = (leading[:, None] * size + torch.arange(first, last, dtype=torch.int32)).reshape(-1)
    seed = zlib.crc32(f"{name}@{version}".encode()) - (1 << 31)
    row_hash, column_hash = _mix(leading ^ seed), _mix(columns * 0x3C6EF372 - 0x61C88647)
    step = max(1, BLOCK_ELEMENTS // max(1, len(columns)))
    for first in range(0, len(leading), step):
        yield first, _mix(row_hash[first : first + step, None] + column_hash)


def _mix(hashes: torch.Tensor) -> torch.Tensor:
    """Spread every bit over the word: a multiplication carries upwards, the shift brings it down."""
    hashes = hashes * 0x2C1B3C6D
    return hashes ^ (hashes >> 15)


def _as_dtype(hashes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of ``dtype`` from hashes. Floats are cut to what bfloat16 holds with the top exponent bit cleared: finite,
    and unharmed by a refit into another dtype of that width or more. Not for bool."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        return hashes.to(torch.int16).bitwise_and_(-0x4001).view(torch.bfloat16).to(dtype)
    return hashes.to(_BITS[dtype.itemsize]).view(dtype)


def _rows(region: Region) -> int:
    return prod(region.shape[:-1])
