"""Where whole tensors are put together on the ranks that load them: which of them share memory, and how much; pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from refit_transport.layout.alignment import aligned
from refit_transport.layout.layout import ITEMSIZE

from .plan import IN_FLIGHT, Slab, TransferGroup


@dataclass(frozen=True, slots=True)
class Lifetime:
    """First and last bucket in which parts of a tensor arrive, and its size."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Memory for whole tensors."""

    starts: dict[Hashable, int]
    """Offset of every tensor."""
    in_buckets: int
    """Bytes for tensors that arrive in one bucket."""
    spanning: int
    """Bytes for the others, behind those."""

    @property
    def nbytes(self) -> int:
        return self.in_buckets + self.spanning


NOTHING = WholeLayout({}, 0, 0)


def lay_out_whole(lifetimes: Mapping[Hashable, Lifetime]) -> WholeLayout:
    """Tensors that never live at the same time share memory: those that arrive in one bucket lie in that bucket's slot;
    one that spans buckets has a buffer that later ones reuse."""
    starts, slot_bytes = _in_slots(lifetimes)
    buffer_of, buffers = _in_buffers(lifetimes)
    for key, start in starts.items():
        starts[key] = lifetimes[key].last % IN_FLIGHT * slot_bytes + start
    behind = [IN_FLIGHT * slot_bytes]
    for nbytes in buffers:
        behind.append(behind[-1] + nbytes)
    starts.update((key, behind[buffer]) for key, buffer in buffer_of.items())
    return WholeLayout(starts, behind[0], behind[-1] - behind[0])


def busiest_layout(groups: Sequence[TransferGroup], buckets: Sequence[Sequence[Slab]]) -> WholeLayout:
    """The largest one that any rank of a plan needs."""
    sizes = {number: prod(g.shape) * ITEMSIZE[g.dst_dtype] for number, g in enumerate(groups) if g.whole}
    if not sizes:
        return NOTHING
    lives: dict[int, dict[int, Lifetime]] = {number: {} for number in sizes}
    for at, bucket in enumerate(buckets):
        for slab in bucket:
            if slab.group in sizes:
                known = lives[slab.group].get(slab.member)
                first = at if known is None else known.first
                lives[slab.group][slab.member] = Lifetime(first, at, sizes[slab.group])
    loaded_by: dict[int, list[int]] = {}
    for number in sizes:
        for rank in groups[number].targets:
            loaded_by.setdefault(rank, []).append(number)
    layouts = [
        lay_out_whole({(number, member): life for number in numbers for member, life in lives[number].items()})
        for numbers in {tuple(numbers) for numbers in loaded_by.values()}
    ]
    return max(layouts, key=lambda layout: layout.nbytes, default=NOTHING)


def _in_slots(lifetimes: Mapping[Hashable, Lifetime]) -> tuple[dict[Hashable, int], int]:
    """Offset inside its bucket's slot for every tensor that arrives in one bucket, and the size of a slot."""
    fill: dict[int, int] = {}
    offsets = {}
    for key, life in lifetimes.items():
        if life.first == life.last:
            offsets[key] = fill.get(life.last, 0)
            fill[life.last] = aligned(offsets[key] + life.nbytes)
    return offsets, max(fill.values(), default=0)


def _in_buffers(lifetimes: Mapping[Hashable, Lifetime]) -> tuple[dict[Hashable, int], list[int]]:
    """Buffer number of every tensor that spans buckets, and the size of each buffer. A buffer is free again once no
    bucket in flight can still use it, ``IN_FLIGHT`` buckets after its tensor was complete."""
    spanning = [key for key, life in lifetimes.items() if life.first < life.last]
    buffer_of: dict[Hashable, int] = {}
    buffers: list[int] = []
    free_at: list[int] = []
    for key in sorted(spanning, key=lambda key: lifetimes[key].first):
        free = [i for i, at in enumerate(free_at) if at <= lifetimes[key].first]
        if free:
            index = max(free, key=lambda i: buffers[i])
        else:
            index = len(buffers)
            buffers.append(0)
            free_at.append(0)
        buffers[index] = max(buffers[index], aligned(lifetimes[key].nbytes))
        free_at[index] = lifetimes[key].last + IN_FLIGHT
        buffer_of[key] = index
    return buffer_of, buffers
