"""The least any transport can do: bytes that must cross the network, and the time the cards need for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from refit_transport.layout.region import Region

from .config import Cluster
from .workload import BenchTensor, Placement, regions


@dataclass(frozen=True, slots=True)
class NetworkMinimum:
    """Per domain: bytes that its ranks need and do not hold, and bytes that others need and only it holds."""

    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.incoming)

    def seconds(self, cluster: Cluster) -> float:
        """No schedule is faster: a domain's bytes pass through its cards, and what only it holds leaves it once (other
        domains may relay). Frame headers are left out, so 0.993 of it is what a card can reach."""
        cards = [len(domain) if cluster.nic == "rank" else 1 for domain in cluster.domains]
        busiest = max(max(i, o) / n for i, o, n in zip(self.incoming, self.outgoing, cards, strict=True))
        return busiest * 8 / cluster.bits_per_second


def network_minimum(tensors: Iterable[BenchTensor], domains: Sequence[tuple[int, ...]]) -> NetworkMinimum:
    """Exact, by volumes of unions of boxes; tensors that are laid out alike are computed once."""
    alike = Counter((t.trainers, t.engines, t.logical.shape, t.wire_nbytes) for t in tensors)
    incoming, outgoing = [0] * len(domains), [0] * len(domains)
    for (trainers, engines, shape, nbytes), count in alike.items():
        into, out = _minimum_of_one(trainers, engines, shape, tuple(domains))
        for number in range(len(domains)):
            incoming[number] += into[number] * nbytes // prod(shape) * count
            outgoing[number] += out[number] * nbytes // prod(shape) * count
    return NetworkMinimum(tuple(incoming), tuple(outgoing))


def received_bytes(tensors: Iterable[BenchTensor]) -> int:
    """Bytes that all inference ranks together end up with, replicas counted."""
    return sum(
        sum(region.numel for region in regions(t.engines, t.logical.shape).values())
        * t.wire_nbytes
        // prod(t.logical.shape)
        for t in tensors
    )


@lru_cache(maxsize=4096)
def _minimum_of_one(
    trainers: Placement, engines: Placement, shape: tuple[int, ...], domains: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements that must enter and leave each domain for one tensor."""
    held = [_boxes(trainers, shape, domain) for domain in domains]
    needed = [_boxes(engines, shape, domain) for domain in domains]
    incoming, outgoing = [], []
    for number in range(len(domains)):
        incoming.append(_volume(needed[number], without=held[number]))
        abroad = [box for other, boxes in enumerate(needed) if other != number for box in boxes]
        elsewhere = [box for other, boxes in enumerate(held) if other != number for box in boxes]
        overlap = [common for box in abroad for mine in held[number] if (common := box.intersect(mine))]
        outgoing.append(_volume(overlap, without=elsewhere))
    return tuple(incoming), tuple(outgoing)


def _boxes(placement: Placement, shape: tuple[int, ...], ranks: tuple[int, ...]) -> list[Region]:
    return sorted({region for rank, region in regions(placement, shape).items() if rank in ranks})


def _volume(boxes: Sequence[Region], without: Sequence[Region]) -> int:
    """Elements in the union of ``boxes`` and in none of ``without``: the grid of all edges is coloured cell by cell."""
    if not boxes:
        return 0
    dimensions = range(len(boxes[0].start))
    edges = [sorted({e for box in (*boxes, *without) for e in (box.start[d], box.stop[d])}) for d in dimensions]
    volume = 0
    for cell in product(*map(pairwise, edges)):
        region = Region(tuple(a for a, _ in cell), tuple(b for _, b in cell))
        if any(box.contains(region) for box in boxes) and not any(box.contains(region) for box in without):
            volume += region.numel
    return volume
