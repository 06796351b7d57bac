"""What travels on a connection between two ranks: fixed headers, some followed by bytes."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .shm import BlockAddress

MAGIC = b"refit\x00\x00\x01"
TOKEN_BYTES = 16


class Kind(IntEnum):
    """Frames of a refit."""

    BEGIN = 1
    """First frame of every refit in both directions: ``value`` is the version, ``digest`` the plan's."""
    SHARE = 2
    """``value`` bytes follow: where the sender stages what it sends to this peer."""
    DATA = 3
    """``value`` bytes follow: the message of (bucket, hop)."""
    READY = 4
    """The message of (bucket, hop) can be read where its sender staged it."""
    RELEASE = 5
    """The message of (bucket, hop) has been read; its staging may be used again."""
    STORED = 6
    """All messages that came over this connection in this refit have been stored."""


_HEADER = struct.Struct("<BxHIQ16s")
HEADER_BYTES = _HEADER.size


def frame(kind: Kind, bucket: int = 0, hop: int = 0, value: int = 0, digest: bytes = b"") -> bytes:
    return _HEADER.pack(kind, hop, bucket, value, digest)


def parse(header: bytes | bytearray) -> tuple[int, int, int, int, bytes]:
    """(kind, bucket, hop, value, digest)"""
    kind, hop, bucket, value, digest = _HEADER.unpack(header)
    return kind, bucket, hop, value, digest


def short_digest(digest: str) -> bytes:
    """A plan digest as a header carries it: 16 bytes."""
    return hashlib.sha256(digest.encode()).digest()[:16]


_BLOCK = struct.Struct("<IIQ16s")


def pack_share(address: BlockAddress, table: np.ndarray) -> bytes:
    """``table``: int64 [segments, 4] of bucket, hop, offset in the block, bytes; in message order."""
    return _BLOCK.pack(address.pid, address.fd, address.nbytes, address.token) + table.astype("<i8").tobytes()


def unpack_share(payload: bytes | bytearray) -> tuple[BlockAddress, np.ndarray]:
    address = BlockAddress(*_BLOCK.unpack_from(payload))
    return address, np.frombuffer(payload, dtype="<i8", offset=_BLOCK.size).reshape(-1, 4)


class Call(IntEnum):
    """Why somebody connects to a rank's port."""

    JOIN = 1
    """To stay: the connection of a pair."""
    FAILED = 2
    """To say that the refit failed; a text follows."""
    PROBE = 3
    """To ask whether the rank still works on the refit."""


_HELLO = struct.Struct("<8sBBHI16s16sI")
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True)
class Hello:
    """First bytes on a new connection. Tokens name incarnations: the caller's, and whom it looks for."""

    call: Call
    rank: int
    token: bytes
    target: bytes
    reads_staging: bool = False
    text: bytes = b""

    def pack(self) -> bytes:
        head = (MAGIC, self.call, self.reads_staging, 0, self.rank, self.token, self.target, len(self.text))
        return _HELLO.pack(*head) + self.text

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Hello | None:
        """None while bytes are missing. Raises ValueError for bytes that no rank sends."""
        if not MAGIC.startswith(bytes(data[: len(MAGIC)])):
            raise ValueError("not a refit connection")
        if len(data) < HELLO_BYTES:
            return None
        _, call, reads, _, rank, token, target, length = _HELLO.unpack_from(data)
        if length > 1 << 16:
            raise ValueError("hello is too long")
        if len(data) < HELLO_BYTES + length:
            return None
        return cls(Call(call), rank, token, target, bool(reads), bytes(data[HELLO_BYTES : HELLO_BYTES + length]))


_REPLY = struct.Struct("<8sBBHI")
REPLY_BYTES = _REPLY.size


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a hello: accepted, or refused with a text."""

    accepted: bool
    reads_staging: bool = False
    text: bytes = b""

    def pack(self) -> bytes:
        return _REPLY.pack(MAGIC, self.accepted, self.reads_staging, 0, len(self.text)) + self.text

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Reply | None:
        """None while bytes are missing. Raises ValueError for bytes that no rank sends."""
        if not MAGIC.startswith(bytes(data[: len(MAGIC)])):
            raise ValueError("the answer is not from a refit rank")
        if len(data) < REPLY_BYTES:
            return None
        _, accepted, reads, _, length = _REPLY.unpack_from(data)
        if length > 1 << 16:
            raise ValueError("the answer is too long")
        if len(data) < REPLY_BYTES + length:
            return None
        return cls(bool(accepted), bool(reads), bytes(data[REPLY_BYTES : REPLY_BYTES + length]))
