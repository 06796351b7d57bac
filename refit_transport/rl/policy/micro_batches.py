"""Which rows of a batch a data-parallel rank works on, cut into micro-batches.

Every worker is handed the whole batch and takes its own rows. So the global sums need no communication, and a step
trains on the same rows whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from refit_transport.rl.batch import Batch


class Loss(Protocol):
    """A picklable callable, such as ``ClippedPolicyLoss``. ``outputs`` is float32 [b, s] (log-probabilities or values),
    aligned with ``input_ids``. The loss is a scalar already divided by the ``sums`` of the global batch, so that the
    losses and metrics of all micro-batches of all ranks add up to those of the optimizer step."""

    def __call__(
        self, outputs: torch.Tensor, batch: Batch, sums: Mapping[str, float]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]: ...


def rank_rows(rows: range, rank: int, size: int) -> range:
    """The contiguous share of ``rows`` of data-parallel ``rank`` of ``size``; as torch.chunk cuts, so the last share
    may be shorter, or empty."""
    share = -(-len(rows) // size)
    return rows[rank * share : (rank + 1) * share]


def step_rows(count: int, global_batch_size: int) -> Iterator[range]:
    """Rows of each optimizer step; the last step may have fewer."""
    for start in range(0, count, global_batch_size):
        yield range(start, min(count, start + global_batch_size))


def micro_batch_rows(rows: range, rank: int, size: int, micro_batch_size: int) -> Iterator[range]:
    """This rank's micro-batches of ``rows``, equally many on every rank: a rank that runs out of rows yields empty
    ranges, because the other ranks' collectives need it."""
    mine = rank_rows(rows, rank, size)
    for start in range(0, len(rank_rows(rows, 0, size)), micro_batch_size):
        yield mine[start : start + micro_batch_size]


def take_rows(batch: Batch, rows: range, device: torch.device) -> Batch:
    """``rows`` of every tensor on ``device``, cut to the longest of these rows. Empty ``rows`` give the first row:
    something to run whose result counts for nothing."""
    picked = rows or range(1)
    width = batch["input_ids"].shape[1]
    longest = max(2, int(batch["input_lengths"][picked.start : picked.stop].max())) if width > 1 else width
    part = {}
    for name, tensor in batch.items():
        piece = tensor[picked.start : picked.stop]
        piece = piece[:, :longest] if piece.ndim > 1 and piece.shape[1] == width else piece
        part[name] = piece.to(device, non_blocking=True)
    return part
