"""The plainest copy between two processes: one socket, one sender, one receiver, as many bytes as a refit delivers."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch

from refit_transport.bench.bound import received_bytes

from .base import RankContext

BLOCK_BYTES = 8 << 20


class Stream:
    """From the first trainer rank to the first inference rank; the others stand by. The contents are not weights, so
    nothing can be checked: it is a yardstick, not a refit."""

    def __init__(self, context: RankContext, name: str) -> None:
        config = context.config
        self._rank, self._address = context.rank, context.interfaces.address
        self._sender, self._receiver = min(config.trainers.ranks), min(config.engines.ranks)
        self._nbytes = received_bytes(context.tensors)
        self._socket: socket.socket | None = None

    def publish(self) -> dict[str, Any]:
        if self._rank != self._receiver:
            return {}
        self._listener = socket.create_server((self._address, 0))
        return {"address": self._listener.getsockname()}

    def connect(self, published: Mapping[int, dict[str, Any]]) -> None:
        if self._rank == self._sender:
            self._socket = socket.create_connection(published[self._receiver]["address"], timeout=60)
        elif self._rank == self._receiver:
            self._socket, _ = self._listener.accept()
            self._socket.settimeout(60)
            self._listener.close()
        self._block = memoryview(torch.zeros(BLOCK_BYTES, dtype=torch.uint8).numpy())

    def run(self, version: int) -> dict[str, Any]:
        left = self._nbytes if self._socket is not None else 0
        while left:
            if self._rank == self._sender:
                self._socket.sendall(self._block[: min(left, BLOCK_BYTES)])
                left -= min(left, BLOCK_BYTES)
            else:
                arrived = self._socket.recv_into(self._block[: min(left, BLOCK_BYTES)])
                if not arrived:
                    raise EOFError("stream: the sender is gone")
                left -= arrived
        return {}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
