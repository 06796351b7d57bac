"""Tells each receiver where messages forwarded to it are cut: they leave from several runs of the sender's staging."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch.distributed as dist

from refit_transport.runtime.binding import Binding, peers_of
from refit_transport.runtime.replay import BoundMessage

from .base import WireError
from .cuts import common_cuts, cut_points

Cuts = dict[tuple[int, int, bool], list[int]]
"""(bucket, index of the message, sending) -> byte offsets at which the message is cut."""


def exchange_cuts(binding: Binding, rank: int, store: dist.Store, deadline: float) -> Cuts:
    """Agree with every peer through ``store``. Raises WireError naming the peer that did not answer by ``deadline``."""
    cuts: Cuts = {}
    outgoing: dict[int, list[list[int]]] = {peer: [] for peer in peers_of(binding.program)}
    for number, bucket in enumerate(binding.buckets):
        for index, message in _by_hop(bucket.sends):
            cuts[number, index, True] = cut_points(message.segments)
            outgoing[message.peer].append(cuts[number, index, True])
    for peer, lists in outgoing.items():
        store.set(f"{rank}>{peer}", json.dumps(lists))
    incoming = {peer: iter(_fetch(store, peer, rank, deadline)) for peer in outgoing}
    for number, bucket in enumerate(binding.buckets):
        for index, message in _by_hop(bucket.recvs):
            cuts[number, index, False] = common_cuts(cut_points(message.segments), next(incoming[message.peer]))
    return cuts


def _by_hop(messages: list[BoundMessage]) -> list[tuple[int, BoundMessage]]:
    """The order in which both ends count the messages between them."""
    return sorted(enumerate(messages), key=lambda item: item[1].hop)


def _fetch(store: dist.Store, peer: int, rank: int, deadline: float) -> list[list[int]]:
    key = f"{peer}>{rank}"
    try:
        store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        return json.loads(store.get(key))
    except RuntimeError as error:
        text = f"rank {peer} did not say where its messages are cut: {error}"
        raise WireError(text, peer=peer, phase="bind") from error
