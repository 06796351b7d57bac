"""One end of the connection of a pair of ranks: what waits to be sent, and what is being received. Never blocks."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .base import Peer
from .tcp_frames import HEADER_BYTES

if TYPE_CHECKING:
    from .tcp_replay import Recv, Send

MAX_VECTORS = 64
"""Runs of memory per sendmsg; more would copy long lists for every megabyte."""


def tune(sock: socket.socket, send_buffer: int, congestion: str | None) -> None:
    """Options of a data connection.

    ``send_buffer``: what the kernel holds back of a flow, in bytes. Small, so that the flows of a rank stay in step:
    with the kernel's own megabytes per flow, some destinations run ahead while others starve. 0 leaves the kernel's.
    ``congestion``: reno fills a fabric that does not lose packets better than bbr, the default of some systems; a name
    that the kernel refuses is left alone.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)


def views_of(segments: Sequence[torch.Tensor]) -> list[memoryview]:
    """The memory of uint8 tensors, for the socket calls."""
    return [memoryview(segment.numpy()) for segment in segments]


class Memory:
    """Runs of memory that are sent or received one after the other, and how far that has come."""

    __slots__ = ("at", "index", "left", "nbytes", "views")

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.nbytes = sum(len(view) for view in views)
        self.rewind()

    def rewind(self) -> None:
        self.index = self.at = 0
        self.left = self.nbytes

    def send(self, sock: socket.socket, limit: int) -> int:
        """Send once, up to ``limit`` bytes; returns how many were taken. Raises BlockingIOError when none can be."""
        sent = sock.sendmsg(self._next(limit))
        self._advance(sent)
        return sent

    def receive(self, sock: socket.socket, limit: int) -> int:
        """Receive once; 0 means that the peer has closed. Raises BlockingIOError when nothing is there."""
        view = self.views[self.index]
        got = sock.recv_into(view[self.at : self.at + limit])
        self._advance(got)
        return got

    def _next(self, limit: int) -> list[memoryview]:
        """Up to ``limit`` bytes from the current position."""
        taken: list[memoryview] = []
        at = self.at
        for view in self.views[self.index : self.index + MAX_VECTORS]:
            taken.append(view[at : at + limit])
            limit -= len(taken[-1])
            at = 0
            if limit <= 0:
                break
        return taken

    def _advance(self, count: int) -> None:
        self.left -= count
        self.at += count
        while self.index < len(self.views) and self.at >= len(self.views[self.index]):
            self.at -= len(self.views[self.index])
            self.index += 1


@dataclass(frozen=True, slots=True)
class SharedStaging:
    """A peer's staging as this rank reads it."""

    memory: torch.Tensor
    table: np.ndarray
    """int64 [segments, 4] of bucket, hop, offset, bytes."""
    digest: bytes


class Connection:
    """State of one pair's connection."""

    def __init__(self, sock: socket.socket, peer: Peer, *, domain: bool, reads: bool, read_by: bool) -> None:
        self.sock, self.peer = sock, peer
        self.link = "domain" if domain else "network"
        self.reads, self.read_by = reads, read_by
        """Whether this rank reads the peer's staging in place, and the peer this rank's."""
        self.interest = 0
        """What the poller watches for."""
        self.outbox: deque[tuple[Memory, Send | None]] = deque()
        """What waits to be sent, and the message that it is (None for other frames)."""
        self.header_bytes = bytearray(HEADER_BYTES)
        self.header = Memory([memoryview(self.header_bytes)])
        self.body: Memory | None = None
        """What follows the last header."""
        self.receiving: Recv | None = None
        """The message that ``body`` is; None when it is a SHARE."""
        self.paused = False
        """A complete header waits whose frame cannot be taken yet; nothing more is read."""
        self.closed = False
        """The peer has closed its end."""
        self.begun = False
        """The peer has begun the current refit."""
        self.published: object = None
        """The replay whose staging the peer knows."""
        self.shared: SharedStaging | None = None

    def close(self) -> None:
        """Close the socket and let go of everything that holds memory."""
        self.sock.close()
        self.outbox.clear()
        self.body = self.receiving = self.published = self.shared = None

    def unread(self) -> int:
        """Bytes that wait in the kernel."""
        return struct.unpack("i", fcntl.ioctl(self.sock, termios.FIONREAD, b"\0\0\0\0"))[0]
