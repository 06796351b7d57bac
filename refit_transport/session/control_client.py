"""A member's end of the control connection: gathers, phases, and news of failures."""

from __future__ import annotations

import selectors
import socket
import time
from typing import Any

from .errors import HandshakeError, RefitError
from .frames import Inbox, Outbox, encode

_GRACE = 2.0
"""Seconds that a member waits beyond a gather's deadline for the server to say who was missing."""


class ControlClient:
    """Connects to the session's control server. Not thread-safe: one thread per member uses it."""

    def __init__(self, address: str, rank: int, label: str, deadline: float) -> None:
        self.rank, self.label = rank, label
        endpoint, _, token = address.partition("#")
        host, _, port = endpoint.rpartition(":")
        if not (host and port.isdigit() and token):
            raise HandshakeError(
                f"control address {address!r}: expected host:port#token as ControlServer.address gives"
            )
        self._sock = self._reach(host, int(port), deadline)
        self._sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._inbox, self._outbox = Inbox(), Outbox()
        self._welcome: dict[str, Any] | None = None
        self._gathered: dict[str, list[bytes]] = {}
        self._failure: str | None = None
        self._round = 0
        self._send({"op": "hello", "rank": rank, "label": label, "token": token})
        self._wait(lambda: self._welcome, deadline, "the control server's welcome")
        self.world_size: int = self._welcome["world_size"]
        self.options: dict[str, Any] = self._welcome["options"]

    def _reach(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                sock = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except OSError as error:
                if time.monotonic() > deadline:
                    raise HandshakeError(f"{self.label}: no control server at {host}:{port}: {error}") from error
                time.sleep(0.05)

    @property
    def own_address(self) -> str:
        """This host's address on the way to the coordinator: other members reach this one there."""
        return self._sock.getsockname()[0]

    def phase(self, name: str) -> None:
        """Tell the server what this member is doing, for the others' error if it is lost."""
        self._send({"op": "phase", "phase": name})

    def all_gather(self, name: str, payload: bytes, timeout: float) -> list[bytes]:
        """Every member's payload, by rank. All members call it in the same order with the same ``name``. Raises
        RefitError when a member fails, or does not come within ``timeout`` seconds (it is named)."""
        self._round += 1
        tag = f"{name}/{self._round}"
        self._send({"op": "phase", "phase": name})
        self._send({"op": "gather", "tag": tag, "payload": payload, "timeout": timeout})
        self._wait(lambda: self._gathered.get(tag), time.monotonic() + timeout + _GRACE, name)
        return self._gathered.pop(tag)

    def failed(self) -> str | None:
        """News of a failure anywhere in the session; never blocks."""
        self._pump(0)
        return self._failure

    def fail(self, text: str) -> None:
        """Tell every other member that this one failed. The first failure of the session is what all report."""
        try:
            self._send({"op": "fail", "text": text})
            self._drain(1.0)
        except RefitError:
            pass

    def close(self, *, bye: bool = True) -> None:
        if self._sock.fileno() < 0:
            return
        if bye and self._failure is None:
            try:
                self._send({"op": "bye"})
                self._drain(1.0)
            except RefitError:
                pass
        self._selector.close()
        self._sock.close()

    # ---- plumbing --------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.put(encode(message))
        self._flush()

    def _flush(self) -> None:
        try:
            self._outbox.flush(self._sock)
        except OSError:
            self._failure = self._failure or "the session's coordinator was lost (its control connection closed)"

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._outbox and self._failure is None and time.monotonic() < deadline:
            self._pump(0.05)

    def _pump(self, timeout: float) -> None:
        if self._sock.fileno() < 0:
            return
        self._flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        self._selector.modify(self._sock, events)
        if not self._selector.select(timeout):
            return
        messages, opened = self._inbox.read(self._sock)
        for message in messages:
            if message["op"] == "welcome":
                self._welcome = message
            elif message["op"] == "gathered":
                self._gathered[message["tag"]] = message["payloads"]
            elif message["op"] == "failed":
                self._failure = self._failure or message["text"]
        if not opened:
            self._failure = self._failure or "the session's coordinator was lost (its control connection closed)"

    def _wait(self, ready: Any, deadline: float, what: str) -> None:
        while ready() is None:
            if self._failure is not None:
                raise RefitError(self._failure)
            if time.monotonic() > deadline:
                raise RefitError(f"{self.label}: {what} did not arrive in time, and the coordinator does not answer")
            self._pump(0.1)
