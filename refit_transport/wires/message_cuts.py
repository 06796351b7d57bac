"""Cuts each message alike at both ends: it may leave from several runs of memory and arrive in several others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from refit_transport.runtime.binding import Binding, peers_of
from refit_transport.runtime.replay import BoundMessage

from .base import WireError
from .cuts import common_cuts, cut, cut_points

DIRECT_BYTES = 1 << 20
"""A contiguous piece of at least this size travels from and into its live tensor. Smaller ones are packed: each run of
memory is an operation of its own."""

Key = tuple[int, int, bool]
"""(bucket, index of the message in it, sending)."""


class CutMessages:
    """The messages of one binding as lists of uint8 parts, the same at both ends; see ``agree``."""

    def __init__(self, binding: Binding, own: dict[Key, list[int]], common: dict[Key, list[int]]) -> None:
        self.binding, self._own, self._common = binding, own, common
        self._generation = -1
        self._parts: dict[Key, list[torch.Tensor]] = {}

    @classmethod
    def agree(cls, binding: Binding, rank: int, store: dist.Store, deadline: float) -> CutMessages:
        """With every peer through ``store``. Raises WireError naming the peer that did not answer by ``deadline``."""
        own = {key: cut_points(message.segments) for key, message in _messages(binding)}
        for peer in peers_of(binding.program):
            mine = [own[key] for key, message in _messages(binding) if message.peer == peer and key[2]]
            theirs = [own[key] for key, message in _messages(binding) if message.peer == peer and not key[2]]
            store.set(f"{rank}>{peer}", json.dumps([mine, theirs]))
        said = {peer: _fetch(store, peer, rank, deadline) for peer in peers_of(binding.program)}
        answers = {peer: (iter(sent), iter(received)) for peer, (sent, received) in said.items()}
        common = {
            key: common_cuts(own[key], next(answers[message.peer][key[2]])) for key, message in _messages(binding)
        }
        return cls(binding, own, common)

    def refresh(self) -> None:
        """Take the parts of the present memory; does nothing while it is the same. Raises WireError when tensors moved
        in a way that cuts messages differently: the peers would have to know."""
        if self.binding.generation == self._generation:
            return
        if {key: cut_points(message.segments) for key, message in _messages(self.binding)} != self._own:
            raise WireError(
                f"rank {self.binding.rank}: tensors moved since the session was joined, and other pieces of them are "
                "contiguous now; join a new session",
                phase="bind",
            )
        self._parts = {key: cut(message.segments, self._common[key]) for key, message in _messages(self.binding)}
        self._generation = self.binding.generation

    def __call__(self, bucket: int, index: int, sending: bool) -> list[torch.Tensor]:
        """The parts of a message."""
        return self._parts[bucket, index, sending]


def _messages(binding: Binding) -> Iterable[tuple[Key, BoundMessage]]:
    """In the order in which both ends count the messages between them."""
    for number, bucket in enumerate(binding.buckets):
        for sending, messages in ((True, bucket.sends), (False, bucket.recvs)):
            for index, message in sorted(enumerate(messages), key=lambda item: item[1].hop):
                yield (number, index, sending), message


def _fetch(store: dist.Store, peer: int, rank: int, deadline: float) -> tuple[list[list[int]], list[list[int]]]:
    """Where ``peer`` cuts what it sends to this rank, and what it receives from it."""
    key = f"{peer}>{rank}"
    try:
        store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        sent, received = json.loads(store.get(key))
        return sent, received
    except RuntimeError as error:
        text = f"rank {peer} did not say where its messages are cut: {error}"
        raise WireError(text, peer=peer, phase="bind") from error
