"""The connections of a running refit: who may send a chunk next, who is read, and what the poller watches."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import WireError, WireStats
from .tcp_connection import Connection, Memory
from .tcp_replay import Send

READ_TURNS = 8
"""Receive calls for one connection before the others have their turn."""
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@dataclass(frozen=True, slots=True)
class Events:
    """What the owner of the flows is told."""

    before_send: Callable[[Send], None]
    """The first byte of a message is about to leave."""
    sent: Callable[[Send], None]
    received: Callable[[Connection, Memory], None]
    """A header or a body is complete."""
    closing: Callable[[Connection], None]
    """The peer has closed; what it sent before may still wait in the kernel."""
    ended: Callable[[Connection], None]
    """Nothing is left to read."""
    lost: Callable[[Connection, str], WireError]
    moved: Callable[[], None]
    called: Callable[[], None]
    """Something happened on a descriptor that is no connection of the refit."""


class Flows:
    """Sends and receives without blocking. Every connection with room sends one chunk in its turn, so that no
    destination gets ahead of the others by more than what the kernel holds back."""

    def __init__(
        self,
        poller: select.epoll,
        connections: Sequence[Connection],
        chunk_bytes: int,
        stats: WireStats,
        events: Events,
    ) -> None:
        self.poller, self.connections, self.events = poller, connections, events
        self._chunk_bytes, self._seconds = chunk_bytes, stats.seconds
        self._by_fd = {connection.sock.fileno(): connection for connection in connections}
        self._turns: deque[Connection] = deque()
        """Connections that have something to send and, for all that is known, room for it."""

    @property
    def can_send(self) -> bool:
        return bool(self._turns)

    def enqueue(self, connection: Connection, memory: Memory, send: Send | None = None) -> None:
        if not connection.outbox and not connection.interest & select.EPOLLOUT:
            self._turns.append(connection)
        connection.outbox.append((memory, send))

    def post(self, connection: Connection, data: bytes) -> None:
        self.enqueue(connection, Memory([memoryview(data)]))

    def send_turn(self) -> None:
        """Give every connection that has room one chunk."""
        for _ in range(len(self._turns)):
            connection = self._turns.popleft()
            if self._send_chunk(connection) and connection.outbox:
                self._turns.append(connection)

    def poll(self, timeout: float) -> None:
        """Wait for something to happen, up to ``timeout`` seconds, and serve it."""
        started = time.perf_counter()
        happened = self.poller.poll(timeout)
        self._seconds["wait"] += time.perf_counter() - started
        for fd, event in happened:
            connection = self._by_fd.get(fd)
            if connection is None:
                self.events.called()
                continue
            if event & select.EPOLLOUT:
                self.watch(connection, connection.interest & ~select.EPOLLOUT)
                self._turns.append(connection)
            if event & select.EPOLLIN and not connection.paused:
                self._read(connection)
            if event & GONE:
                self.events.closing(connection)

    def watch(self, connection: Connection, interest: int) -> None:
        if interest == connection.interest:
            return
        fd = connection.sock.fileno()
        if not interest:
            self.poller.unregister(fd)
        elif not connection.interest:
            self.poller.register(fd, interest)
        else:
            self.poller.modify(fd, interest)
        connection.interest = interest

    def pause(self, connection: Connection) -> None:
        """Read no more; the kernel then makes the peer wait."""
        connection.paused = True
        self.watch(connection, connection.interest & ~select.EPOLLIN)

    def resume(self, connection: Connection) -> None:
        connection.paused = False
        self.watch(connection, connection.interest | select.EPOLLIN)

    def _send_chunk(self, connection: Connection) -> bool:
        """False when there was no room."""
        memory, send = connection.outbox[0]
        if send is not None and not send.packed:
            self.events.before_send(send)
        started = time.perf_counter()
        try:
            memory.send(connection.sock, self._chunk_bytes)
        except BlockingIOError:
            self.watch(connection, connection.interest | select.EPOLLOUT)
            return False
        except OSError as error:
            raise self.events.lost(connection, f"broke its connection ({error.strerror})") from error
        finally:
            self._seconds[connection.link] += time.perf_counter() - started
        self.events.moved()
        if not memory.left:
            connection.outbox.popleft()
            if send is not None:
                self.events.sent(send)
        return True

    def _read(self, connection: Connection) -> None:
        for _ in range(READ_TURNS):
            memory = connection.body or connection.header
            started = time.perf_counter()
            try:
                got = memory.receive(connection.sock, self._chunk_bytes)
            except BlockingIOError:
                return
            except OSError as error:
                raise self.events.lost(connection, f"broke its connection ({error.strerror})") from error
            finally:
                self._seconds[connection.link] += time.perf_counter() - started
            if not got:
                self.events.ended(connection)
                return
            self.events.moved()
            if not memory.left:
                self.events.received(connection, memory)
                if connection.paused:
                    return
