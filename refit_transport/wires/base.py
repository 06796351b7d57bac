"""What moves the bytes of a program. A wire connects once per membership and then runs the same program many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from refit_transport.runtime.binding import Binding


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank as the others must know it to reach it. Plain data, exchanged at the handshake."""

    rank: int
    role: str
    """``trainer`` or ``engine``."""
    host: str
    """Hostname, for messages."""
    domain: int
    pid: int
    incarnation: str
    """Changes when the process does: connections of an earlier one are never reused."""
    endpoint: dict[str, object] = field(default_factory=dict)
    """What the wire published in ``listen``."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(slots=True)
class WireStats:
    """Bytes that this rank sent and received in one refit, by link class, counted where they enter the wire."""

    sent: dict[str, int] = field(default_factory=lambda: {"network": 0, "domain": 0, "local": 0})
    received: dict[str, int] = field(default_factory=lambda: {"network": 0, "domain": 0, "local": 0})
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: ``pack``, ``network``, ``domain``, ``unpack``, ``load``, ``wait``."""


class WireError(RuntimeError):
    """A transfer failed. Names the peer, the phase, the bucket and the cause."""

    def __init__(self, message: str, *, peer: int | None = None, phase: str = "", bucket: int | None = None) -> None:
        super().__init__(message)
        self.peer, self.phase, self.bucket = peer, phase, bucket


class Wire(Protocol):
    """One rank's end. ``listen`` then ``connect`` once; ``run`` per refit; ``close`` at any time, twice without
    harm."""

    name: str

    def listen(self, rank: int) -> dict[str, object]:
        """Open whatever peers will connect to and return it as plain data (the port stays open from here on)."""

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        """Reach every peer that the program talks to. ``deadline`` is a ``time.monotonic()`` value.
        Raises WireError naming the peer that did not answer."""

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        """Run every bucket. ``failed`` is polled at least every 0.2 s while waiting; when it returns a text (another
        rank's failure, learnt from the control connection) the run stops with a WireError that carries it.
        After a WireError the wire is unusable until it is closed and connected anew."""

    def close(self) -> None:
        """Release sockets, groups, shared memory and threads. Wakes a ``run`` in another thread."""
