"""When a lock-step wire packs, posts, waits for and unpacks what: one order of actions, the same on every rank; pure.

A bucket travels by hops: hop 0 leaves the owners of the bytes, hop h forwards what came by hop h - 1. While it is
packed, exchanged, forwarded and unpacked it keeps one of ``SLOTS`` slots of memory, so bucket b + SLOTS is packed after
bucket b was unpacked.

While a bucket crosses the network, those before it are forwarded, the one before those is unpacked and the next one is
packed. The next one is posted before the present one is waited for, so that the network never idles, but not sooner:
flows of several buckets drift apart, and the slowest is waited for at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refit_transport.runtime.staging import SLOTS

Group = tuple[tuple[int, int], ...]
"""What is posted at once: (bucket, hop) of each."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Fill the slot of ``bucket``. From here on its messages may also be received into it."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Post:
    """Start the sends and receives of ``group``."""

    group: Group


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for all sends and receives of ``group``."""

    group: Group


@dataclass(frozen=True, slots=True)
class Unpack:
    """Empty the slot of ``bucket``, which is complete and no longer read by anyone."""

    bucket: int


Action = Pack | Post | Wait | Unpack


def schedule(buckets: int, hops: int, *, in_order: bool) -> Iterator[Action]:
    """The actions of one refit; ``hops`` is the highest hop.

    ``in_order``: the backend runs groups one after the other, so one that forwards may be posted before the one that
    receives was waited for, and a step is one group. Without it groups run side by side, and what forwards is posted
    once it is there.

    A bucket takes hop 0 in one step, and the others in at most two more: with more than two hops these steps have
    several groups.
    """
    depth = max(1, -(-hops // (SLOTS - 2)))
    steps = -(-hops // depth)

    def inside(*items: tuple[int, int]) -> Group:
        return tuple((bucket, hop) for bucket, hop in items if 0 <= bucket < buckets and hop <= hops)

    def forwards(newest: int) -> list[Group]:
        """What forwards when hop 0 of bucket ``newest`` is there."""
        return [inside(*((newest - i, 1 + i * depth + n) for i in range(steps))) for n in range(depth)]

    def posted_together(step: int) -> list[Group]:
        first, *rest = forwards(step - 1)
        return [(*inside((step, 0)), *first), *rest]

    yield from _within(buckets, Pack(0))
    for step in range(buckets + steps + 1):
        done = step - 1
        if in_order:
            yield from (Post(group) for group in posted_together(step) if group)
            yield from (Wait(group) for group in posted_together(done) if group)
        else:
            if first := inside((step, 0)):
                yield Post(first)
            arrived = [inside((done, 0)), forwards(done - 1)[-1]]
            for group in forwards(done):
                yield from (Wait(earlier) for earlier in arrived if earlier)
                if group:
                    yield Post(group)
                arrived = [group]
        yield from _within(buckets, Unpack(done - steps), Pack(step + 1))


def _within(buckets: int, *actions: Pack | Unpack) -> Iterator[Action]:
    return (action for action in actions if 0 <= action.bucket < buckets)
