"""The control server: one per session. Members meet here, exchange plain data, and learn of each other's failures.

A member is in one of three states: connected (has said hello), gone (said bye), lost (closed without bye, or said
that it failed). The first loss ends the session: every other member is told at once, with the lost one's name, its
phase and its cause.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from .frames import Inbox, Outbox, encode

_TICK = 0.1


@dataclass(eq=False)
class _Connection:
    sock: socket.socket
    inbox: Inbox = field(default_factory=Inbox)
    outbox: Outbox = field(default_factory=Outbox)
    rank: int | None = None
    label: str = "an unknown peer"
    phase: str = "hello"


@dataclass(eq=False)
class _Round:
    """One all-gather: payloads by rank, and when it must be complete."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    deadline: float = float("inf")
    seconds: float = 0.0


class ControlServer:
    """Serves one session of ``world_size`` members from a daemon thread. The port is open from construction on.

    ``options`` is plain data that every member receives on joining: the one source of the session's settings.
    """

    def __init__(
        self, world_size: int, options: dict[str, Any] | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        if world_size < 2:
            raise ValueError(f"a session needs at least one trainer and one inference rank; world_size={world_size}")
        self.world_size = world_size
        self._options = options or {}
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((host, port), backlog=max(128, world_size))
        self._listener.setblocking(False)
        self._host, self._port = host, self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_r, self._wake_w = socket.socketpair()
        self._selector.register(self._wake_r, selectors.EVENT_READ, self)
        self._members: dict[int, _Connection] = {}
        self._connections: set[_Connection] = set()
        self._left: dict[int, str] = {}
        self._rounds: dict[str, _Round] = {}
        self._failure: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="refit-control", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What members pass to ``RefitMember.join``: ``host:port#token``."""
        return f"{self._host}:{self._port}#{self._token}"

    @property
    def failure(self) -> str | None:
        """The text of the first failure, or None while the session is sound."""
        return self._failure

    def fail(self, text: str) -> None:
        """End the session from outside (an actor was seen to die, say). The first failure wins."""
        self._pending_failure = text
        self._wake_w.send(b"f")

    def close(self) -> None:
        """Stop serving. Members that are still connected see the server as lost."""
        if not self._closing:
            self._closing = True
            self._wake_w.send(b"c")
        self._thread.join(timeout=5)

    # ---- the serving thread ----------------------------------------------------------------------------------------

    _pending_failure: str | None = None

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(_TICK):
                    self._dispatch(key, events)
                self._expire()
        finally:
            for connection in list(self._connections):
                connection.sock.close()
            for sock in (self._listener, self._wake_r, self._wake_w):
                sock.close()
            self._selector.close()

    def _dispatch(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data is None:
            self._accept()
        elif key.data is self:
            self._wake_r.recv(64)
            if self._pending_failure is not None:
                self._end(self._pending_failure)
        else:
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ and key.data in self._connections:
                self._read(key.data)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            messages, opened = connection.inbox.read(connection.sock)
        except (ValueError, RuntimeError):
            return self._drop(connection)
        for message in messages:
            try:
                self._handle(connection, message)
            except (KeyError, TypeError):
                return self._drop(connection)
        if not opened and connection in self._connections:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """A connection ended without bye. Foreign ones that never said a valid hello disturb nobody."""
        self._forget(connection)
        if connection.rank is not None:
            self._end(f"{connection.label} was lost during {connection.phase} (its control connection closed)")

    def _forget(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()
        if connection.rank is not None and self._members.get(connection.rank) is connection:
            del self._members[connection.rank]

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "hello":
            self._hello(connection, message)
        elif connection.rank is None:
            self._drop(connection)
        elif op == "phase":
            connection.phase = message["phase"]
        elif op == "gather":
            self._gather(connection, message)
        elif op == "fail":
            self._end(message["text"])
        elif op == "bye":
            self._left[connection.rank] = connection.label
            self._forget(connection)
            self._refuse_without_the_left()

    def _hello(self, connection: _Connection, message: dict[str, Any]) -> None:
        rank = message["rank"]
        if message["token"] != self._token:
            self._send(connection, {"op": "failed", "text": "the address is of another session (its token differs)"})
            return self._forget(connection)
        refusal = None
        if not 0 <= rank < self.world_size:
            refusal = f"rank {rank} is outside this session's world of {self.world_size}"
        elif rank in self._members:
            refusal = (
                f"rank {rank} is already taken by {self._members[rank].label}; {message['label']} cannot join as it"
            )
        if refusal:
            self._send(connection, {"op": "failed", "text": refusal})
            return self._end(refusal)
        connection.rank, connection.label = rank, message["label"]
        self._members[rank] = connection
        self._send(connection, {"op": "welcome", "world_size": self.world_size, "options": self._options})
        if self._failure:
            self._send(connection, {"op": "failed", "text": self._failure})

    def _gather(self, connection: _Connection, message: dict[str, Any]) -> None:
        tag = message["tag"]
        step = self._rounds.setdefault(tag, _Round())
        step.payloads[connection.rank] = message["payload"]
        deadline = time.monotonic() + message["timeout"]
        if deadline < step.deadline:
            step.deadline, step.seconds = deadline, message["timeout"]
        self._refuse_without_the_left()
        if len(step.payloads) == self.world_size:
            del self._rounds[tag]
            frame = encode(
                {"op": "gathered", "tag": tag, "payloads": [step.payloads[r] for r in range(self.world_size)]}
            )
            for member in list(self._members.values()):
                member.outbox.put(frame)
                self._flush(member)

    def _refuse_without_the_left(self) -> None:
        """A gather needs every member: it fails at once when one of them has said bye."""
        missing = {rank for step in self._rounds.values() for rank in self._left if rank not in step.payloads}
        if missing:
            names = ", ".join(self._left[rank] for rank in sorted(missing))
            self._end(f"{names} left the session; a refit needs every member of it")

    def _expire(self) -> None:
        now = time.monotonic()
        for tag, step in list(self._rounds.items()):
            if now > step.deadline:
                missing = [rank for rank in range(self.world_size) if rank not in step.payloads]
                names = ", ".join(
                    f"{self._members[r].label} (in phase {self._members[r].phase})"
                    if r in self._members
                    else f"rank {r} (never joined)"
                    for r in missing[:8]
                )
                more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
                self._end(f"{tag.split('/')[0]} was not reached within {step.seconds:g} s by {names}{more}")

    def _end(self, text: str) -> None:
        if self._failure is None:
            self._failure = text
        self._rounds.clear()
        for member in list(self._members.values()):
            self._send(member, {"op": "failed", "text": self._failure})

    def _send(self, connection: _Connection, message: dict[str, Any]) -> None:
        connection.outbox.put(encode(message))
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        try:
            connection.outbox.flush(connection.sock)
        except OSError:
            return self._drop(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        self._selector.modify(connection.sock, events, connection)
