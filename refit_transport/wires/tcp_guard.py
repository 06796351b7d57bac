"""Watches over a running refit: deadlines, failures told by others, peers that closed, stopped or were cut off.

Who is to blame is the hard part: when one rank dies, its peers stop too, and theirs after them. So
  a rank that fails tells its peers the cause, on their ports, before it closes its connections;
  a rank that sees a connection close first listens for such a word;
  a rank that sees no progress asks those it waits for whether they are alive, and blames one that does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .base import WireError
from .tcp_calls import Probe
from .tcp_connection import Connection

if TYPE_CHECKING:
    from .tcp import TcpWire

LISTEN_S = 0.1
"""How long a rank listens for the cause after a peer closed its connection."""


class Guard:
    """``tick`` is called all the time and raises WireError when the refit cannot go on."""

    def __init__(self, wire: TcpWire, deadline: float, failed: Callable[[], str | None], stall_s: float) -> None:
        self._wire, self._failed = wire, failed
        self._deadline, self._stall_s = deadline, stall_s
        self._probes: dict[int, Probe] = {}
        self._moved_at = time.monotonic()
        """When bytes last moved, or when all peers that this rank waits for were last known to be alive."""

    def moved(self) -> None:
        self._moved_at = time.monotonic()

    def tick(self, waits_for: Callable[[], Iterable[Connection]], where: Callable[[], tuple[str, int]]) -> None:
        """``waits_for`` names the peers without which this rank cannot go on, ``where`` the phase and the bucket."""
        now = time.monotonic()
        text = self._failed()
        if text:
            raise self._error(text, None, where())
        if self._wire.closed:
            raise self._error(f"the wire of rank {self._wire.rank} was closed during a refit", None, where())
        quiet = now - self._moved_at
        if now >= self._deadline:
            raise self._overdue(list(waits_for()), where())
        if quiet < self._stall_s / 2:
            self._forget()
        else:
            self._ask(list(waits_for()), quiet, where())

    def lost(self, connection: Connection, what: str, where: tuple[str, int]) -> WireError:
        """The error for a peer that closed or broke its connection, unless another cause is told within moments; that
        one is raised."""
        until = time.monotonic() + LISTEN_S
        while (left := until - time.monotonic()) > 0:
            self._wire.lobby.serve(left)
        return self._error(f"{connection.peer} {what}", connection, where)

    def close(self) -> None:
        self._forget()

    def _ask(self, connections: list[Connection], quiet: float, where: tuple[str, int]) -> None:
        for connection in connections:
            rank = connection.peer.rank
            if rank not in self._probes:
                domain = connection.link == "domain"
                self._probes[rank] = Probe(connection.peer, domain, self._wire.rank, self._wire.token)
        silent = [c for c in connections if not self._probes[c.peer.rank].look()]
        if not silent:
            self._forget()
            self.moved()
        elif quiet >= self._stall_s:
            others = "".join(f", nor did {c.peer}" for c in silent[1:])
            raise self._error(f"{silent[0].peer} did not answer for {quiet:.1f} s{others}", silent[0], where)

    def _overdue(self, connections: list[Connection], where: tuple[str, int]) -> WireError:
        names = ", ".join(str(c.peer) for c in connections) or "nobody"
        text = f"rank {self._wire.rank} did not finish before the deadline; it waits for {names}"
        return self._error(text, connections[0] if connections else None, where)

    def _error(self, text: str, connection: Connection | None, where: tuple[str, int]) -> WireError:
        phase, bucket = where
        if connection is None:
            return WireError(text, phase=phase, bucket=bucket)
        text = f"{text} ({connection.link} transfer, bucket {bucket})"
        return WireError(text, peer=connection.peer.rank, phase=connection.link, bucket=bucket)

    def _forget(self) -> None:
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()
