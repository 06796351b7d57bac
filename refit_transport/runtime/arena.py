"""Memory for whole tensors: where the parts of a full checkpoint tensor are put together before its loader reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .pieces import Traits
from .staging import SLOTS, aligned


@dataclass(frozen=True, slots=True)
class Lifetime:
    """First and last bucket in which parts of a tensor arrive, and what kind of tensor it is."""

    first: int
    last: int
    traits: Traits


class Arena:
    """One tensor per whole parameter. Tensors that never live at the same time share memory: those within one bucket
    lie in that bucket's slot; one that spans buckets has a buffer that later ones reuse."""

    def __init__(self, lifetimes: Mapping[int, Lifetime], allocate: Callable[[int], torch.Tensor]) -> None:
        sizes = {p: _nbytes(life.traits) for p, life in lifetimes.items()}
        offsets, slot_bytes = _bucket_slots(lifetimes, sizes)
        buffer_of, buffers = _spanning_buffers(lifetimes, sizes)
        starts, total = [], slot_bytes * SLOTS
        for size in buffers:
            starts.append(total)
            total += size
        self.nbytes = total
        memory = allocate(total) if total else None
        self.tensors: dict[int, torch.Tensor] = {}
        for p, life in lifetimes.items():
            start = starts[buffer_of[p]] if p in buffer_of else (life.last % SLOTS) * slot_bytes + offsets[p]
            self.tensors[p] = memory[start : start + sizes[p]].view(life.traits.dst).view(life.traits.shape)


def _nbytes(traits: Traits) -> int:
    return torch.Size(traits.shape).numel() * traits.dst.itemsize


def _bucket_slots(lifetimes: Mapping[int, Lifetime], sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Offset inside its bucket's slot for every tensor that arrives in one bucket, and the size of a slot."""
    fill: dict[int, int] = {}
    offsets = {}
    for p, life in lifetimes.items():
        if life.first == life.last:
            offsets[p] = fill.get(life.last, 0)
            fill[life.last] = aligned(offsets[p] + sizes[p])
    return offsets, max(fill.values(), default=0)


def _spanning_buffers(lifetimes: Mapping[int, Lifetime], sizes: Mapping[int, int]) -> tuple[dict[int, int], list[int]]:
    """Buffer number of every tensor that spans buckets, and the size of each buffer. A buffer is free again once no
    bucket in flight can still use it, ``SLOTS`` buckets after its tensor was complete."""
    spanning = sorted((p for p, life in lifetimes.items() if life.first < life.last), key=lambda p: lifetimes[p].first)
    buffer_of: dict[int, int] = {}
    buffers: list[int] = []
    free_at: list[int] = []
    for p in spanning:
        free = [i for i, at in enumerate(free_at) if at <= lifetimes[p].first]
        if free:
            index = max(free, key=lambda i: buffers[i])
        else:
            index = len(buffers)
            buffers.append(0)
            free_at.append(0)
        buffers[index] = max(buffers[index], aligned(sizes[p]))
        free_at[index] = lifetimes[p].last + SLOTS
        buffer_of[p] = index
    return buffer_of, buffers
