"""Where staged bytes lie: who allocates them, which pieces skip them, and which peers read them in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from refit_transport.layout.alignment import PAGE
from refit_transport.planning.plan import IN_FLIGHT

SLOTS = IN_FLIGHT
"""Buckets that have memory at once: while some are exchanged, the next is packed or the last one unpacked."""


def host_memory(nbytes: int) -> torch.Tensor:
    """uint8 tensor of ``nbytes`` in page-aligned host memory, every page touched: the first write to a fresh page costs
    ten times a copy, and must not be paid inside a refit."""
    raw = torch.zeros(nbytes + PAGE, dtype=torch.uint8)
    skip = -raw.data_ptr() % PAGE
    return raw[skip : skip + nbytes]


@dataclass(frozen=True, eq=False)
class Staging:
    """What a wire asks of the memory that messages are packed into. Compared by identity: a new one, a new bind."""

    allocate: Callable[[int], torch.Tensor] = host_memory
    """Staging of a given size: uint8, on the device from which the wire sends."""
    arena: Callable[[int], torch.Tensor] = host_memory
    """Memory in which whole tensors are put together; never shown to peers."""
    direct_bytes: int | None = 64 << 10
    """A contiguous piece of at least this size travels from and into its live tensor; None stages everything, so that
    every message is one run of memory."""
    read_by: frozenset[int] = frozenset()
    """Peers that read this rank's staging where it lies: all that is sent to them must be staged."""
    reads: frozenset[int] = frozenset()
    """Peers whose staging this rank reads where it lies: what they send needs no staging here."""
