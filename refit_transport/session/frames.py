"""Frames of the control connection: length-prefixed msgpack of plain data, no framework types."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

_HEADER = struct.Struct("!Q")
_LIMIT = 1 << 32


class Outbox:
    """Bytes still to be written to one non-blocking socket."""

    def __init__(self) -> None:
        self._pending: list[memoryview] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def put(self, frame: bytes) -> None:
        self._pending.append(memoryview(frame))

    def flush(self, sock: socket.socket) -> None:
        """Write until done or the socket would block. Raises OSError when the peer is gone."""
        while self._pending:
            try:
                written = sock.send(self._pending[0])
            except BlockingIOError:
                return
            self._pending[0] = self._pending[0][written:]
            if not self._pending[0]:
                del self._pending[0]


class Inbox:
    """Reassembles frames from one non-blocking socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def read(self, sock: socket.socket) -> tuple[list[dict[str, Any]], bool]:
        """All complete messages that have arrived, and whether the connection is still open."""
        opened = True
        while True:
            try:
                data = sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                opened = False
                break
            if not data:
                opened = False
                break
            self._buffer += data
        return self._complete(), opened

    def _complete(self) -> list[dict[str, Any]]:
        messages, at = [], 0
        while len(self._buffer) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, at)
            if length > _LIMIT:
                raise ValueError(f"control frame of {length} bytes; at most {_LIMIT} are allowed")
            if len(self._buffer) - at - _HEADER.size < length:
                break
            at += _HEADER.size
            messages.append(msgspec.msgpack.decode(memoryview(self._buffer)[at : at + length]))
            at += length
        del self._buffer[:at]
        return messages


def encode(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body
