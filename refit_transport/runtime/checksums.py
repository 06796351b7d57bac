"""Sums of every piece that a rank sends and receives in a refit, so that both ends of each message can be compared.

A sum is a multilinear hash of the piece's bytes modulo 2^64: 64-bit words, each folded so that its high half counts
twice, times random odd weights, in blocks whose sums are weighted in turn. A change within one word always changes it;
words that trade places, or the same bit flipped in several words, escape with a probability of about 2^-32. Host memory
is summed by numpy, other devices by torch in the same arithmetic.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from refit_transport.planning.program import Program

BLOCK = 1 << 15
"""Words that share one table of weights: 256 KiB, which stays in a core's cache between passes."""
_CHUNK = BLOCK * 128
"""Words that a device sums in one call."""
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""Odd factor from one block's sum to the next."""
_WEIGHTS = np.random.Generator(np.random.PCG64(0x5EED)).integers(-(1 << 63), (1 << 63) - 1, BLOCK, np.int64) | 1


class ByteSum:
    """Callable: the sum of a 1-D uint8 tensor. Keeps scratch memory, so an instance belongs to one thread."""

    def __init__(self) -> None:
        self._folded = np.empty(BLOCK, np.int64)
        self._tables: dict[tuple[torch.device, int, int], torch.Tensor] = {}

    def __call__(self, run: torch.Tensor) -> int | torch.Tensor:
        """An integer below 2^64 for host memory, else an int64 scalar on the tensor's device, not waited for."""
        return self.on_host(run.numpy()) if run.device.type == "cpu" else self.on_device(run)

    def on_host(self, data: np.ndarray) -> int:
        total, factor = data.size, 1
        full = data.size & ~7
        for start in range(0, full, BLOCK * 8):
            words = data[start : min(full, start + BLOCK * 8)].view(np.int64)
            folded = self._folded[: words.size]
            np.right_shift(words, 32, out=folded)
            np.bitwise_xor(words, folded, out=folded)
            total += int(folded.dot(_WEIGHTS[: words.size])) * factor
            if words.size == BLOCK:
                factor = factor * _STEP & _MASK
        if tail := data[full:].tobytes():
            word = int.from_bytes(tail, "little")
            total += (word ^ word >> 32) * int(_WEIGHTS[full // 8 % BLOCK]) * factor
        return total & _MASK

    def on_device(self, run: torch.Tensor) -> torch.Tensor:
        weights = self._table(run.device, 0, 0)
        total = torch.full((), run.numel(), dtype=torch.int64, device=run.device)
        for number, chunk in enumerate(run.split(_CHUNK * 8)):
            count = -(-chunk.numel() // 8)
            blocks, width = max(1, -(-count // BLOCK)), min(count, BLOCK)
            words = torch.zeros(blocks * width * 8, dtype=torch.uint8, device=run.device)
            words[: chunk.numel()].copy_(chunk)
            words = words.view(torch.int64).view(blocks, width)
            sums = ((words ^ (words >> 32)) * weights[:width]).sum(1)
            total += (sums * self._table(run.device, number * (_CHUNK // BLOCK), blocks)).sum()
        return total

    def _table(self, device: torch.device, first: int, blocks: int) -> torch.Tensor:
        """int64 on ``device``: the factors of ``blocks`` blocks from ``first`` on, or without blocks the weights."""
        key = device, first, blocks
        if key not in self._tables:
            factors = [_signed(pow(_STEP, block, 1 << 64)) for block in range(first, first + blocks)]
            table = torch.tensor(factors, dtype=torch.int64) if blocks else torch.from_numpy(_WEIGHTS)
            self._tables[key] = table.to(device)
        return self._tables[key]


class Checksums:
    """The sums of one rank. The binding adds what is to be summed and when; ``begin`` and ``finish`` bracket a refit.

    What several messages carry is summed once. A forwarded piece counts with the sum it had on arrival, so that a
    change between the two shows at the next receiver.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._sum = ByteSum()
        origin = program.pieces.origin
        self._stands_for = np.where(origin >= 0, origin, np.arange(len(origin)))
        """Row whose sum counts, by row."""
        self._taken: list[int | torch.Tensor | None] = [None] * len(origin)
        self._rows = {sent: rows_by_peer(program, sent) for sent in (True, False)}
        self._previous: np.ndarray | None = None
        self.sums: np.ndarray | None = None
        """uint64, by row of the piece table, after ``finish``; 0 for rows that are in no message."""
        self.seconds = 0.0
        """Spent on sums in this refit."""

    def begin(self) -> None:
        self._taken = [None] * len(self._taken)
        self.seconds = 0.0

    def same_as(self, row: int, other: int) -> None:
        """Both rows send the same memory, which is summed for ``other`` (the row itself, if it is alone)."""
        self._stands_for[row] = other

    def take(self, rows: Sequence[int], run_of: Callable[[int], torch.Tensor]) -> Callable[[], None] | None:
        """What to call when the memory of ``rows`` is complete; ``run_of`` gives a row's bytes (uint8, 1-D)."""
        runs = [(row, run_of(row)) for row in rows]

        def record() -> None:
            started = time.perf_counter()
            for row, run in runs:
                self._taken[row] = self._sum(run)
            self.seconds += time.perf_counter() - started

        return record if runs else None

    def finish(self) -> None:
        """Make ``sums`` those of this refit. Raises RuntimeError for a piece that was moved without being summed."""
        started = time.perf_counter()
        self._fetch()
        known = np.array([value is not None for value in self._taken], bool)
        values = np.array([0 if value is None else value & _MASK for value in self._taken], np.uint64)
        sums = np.zeros(len(values), np.uint64)
        for peer, rows in (item for by_peer in self._rows.values() for item in by_peer.items()):
            owners = self._stands_for[rows]
            if not known[owners].all():
                raise RuntimeError(
                    f"rank {self._program.rank}: pieces exchanged with rank {peer} were not summed, because this wire "
                    "moves them without packing or unpacking; set verify: none, or another wire"
                )
            sums[rows] = values[owners]
        self._previous, self.sums = self.sums, sums
        self.seconds += time.perf_counter() - started

    def _fetch(self) -> None:
        """Bring sums that lie on a device to the host, all at once."""
        rows = [row for row, value in enumerate(self._taken) if isinstance(value, torch.Tensor)]
        if rows:
            values = torch.stack([self._taken[row] for row in rows]).tolist()
            for row, value in zip(rows, values, strict=True):
                self._taken[row] = value

    @property
    def unchanged(self) -> bool:
        """Whether every piece of this refit has the sum that it had in the one before."""
        return self._previous is not None and np.array_equal(self._previous, self.sums)

    def digests(self, sent: bool) -> dict[int, bytes]:
        """One digest per peer over all that went to it (or came from it), equal at both ends."""
        return {
            peer: hashlib.blake2b(self.sums[rows].tobytes(), digest_size=8).digest()
            for peer, rows in self._rows[sent].items()
        }

    def between(self, peer: int, sent: bool) -> list[int]:
        """The sums of all pieces that went to ``peer`` (or came from it), in the order that both ends share."""
        return self.sums[self._rows[sent][peer]].tolist() if peer in self._rows[sent] else []


def rows_by_peer(program: Program, sent: bool) -> dict[int, np.ndarray]:
    """Rows of all pieces sent to (or received from) each peer, by bucket and hop: the order that both ends share."""
    rows: dict[int, list[int]] = {}
    for bucket in program.buckets:
        for message in sorted(bucket.sends if sent else bucket.recvs, key=lambda m: m.hop):
            rows.setdefault(message.peer, []).extend(range(message.first, message.last))
    return {peer: np.array(found) for peer, found in rows.items()}


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
