"""Runs one refit over the connections of a rank: buckets open, messages go out in turns, arrive, are stored, forwarded.

A bucket is *open* from packing until it is finished: all messages stored, handed to the engine, sent and, where a peer
reads this rank's staging in place, released. At most ``SLOTS`` successive buckets are open. A message of a bucket that
is not open yet waits in the kernel's buffers, which is all the flow control there is. It cannot lock up: a rank sends
nothing of bucket k before it has sent everything of bucket k - SLOTS, so no message waits behind one of a bucket that
cannot open without it. ``run`` returns once all that this rank sent has been stored by its peers.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from refit_transport.runtime.staging import SLOTS

from .base import WireError, WireStats
from .shm import open_block
from .tcp_connection import Connection, Memory, SharedStaging
from .tcp_flows import Events, Flows
from .tcp_frames import Kind, frame, pack_share, parse, unpack_share
from .tcp_guard import Guard
from .tcp_replay import Recv, Replay, Send

if TYPE_CHECKING:
    from .tcp import TcpWire

POLL_S = 0.1
"""Longest wait without a look at deadlines and at ``failed``."""
STORED = frame(Kind.STORED)


class Exchange:
    """One refit. ``run`` returns its statistics or raises WireError."""

    def __init__(
        self, wire: TcpWire, replay: Replay, version: int, deadline: float, failed: Callable[[], str | None]
    ) -> None:
        self.wire, self.replay, self.version = wire, replay, version
        self.binding = replay.binding
        self.connections = [
            c for rank, c in wire.connections.items() if replay.recv_count[rank] or replay.receipts[rank]
        ]
        """Those of the peers that the program talks to."""
        self.stats = WireStats(seconds=dict.fromkeys(("pack", "network", "domain", "unpack", "load", "wait"), 0.0))
        self.count = len(replay.sends)
        self.first = self.opened = 0
        """Open are the buckets in ``[first, opened)``."""
        self.loaded = 0
        """Buckets before this one have been handed to the engine."""
        self.recv_left = [len(bucket) for bucket in replay.recvs]
        self.send_left = [len(bucket) for bucket in replay.sends]
        self.needs_left = [[len(send.message.needs) for send in bucket] for bucket in replay.sends]
        self.awaited = replay.recv_count.copy()
        """Messages that are not stored yet, by peer."""
        self.receipts = replay.receipts.copy()
        """Confirmations that are still to come, by peer."""
        self.early: dict[int, list[Recv]] = {}
        """Messages that can be read in place, of buckets that are not open yet."""
        self.guard = Guard(wire, deadline, failed, wire.stall_s + replay.most_bytes / wire.bytes_per_s)
        events = Events(
            before_send=self._pack,
            sent=self._sent,
            received=self._received,
            closing=self._closing,
            ended=self._ended,
            lost=self._lost,
            moved=self.guard.moved,
            called=wire.lobby.serve,
        )
        self.flows = Flows(wire.poller, self.connections, wire.chunk_bytes, self.stats, events)

    def run(self) -> WireStats:
        try:
            return self._run()
        finally:
            self.guard.close()
            del self.flows  # They know this object: as a cycle they would keep the staging of a closed wire alive.

    def _run(self) -> WireStats:
        self.replay.rewind()
        for connection in self.wire.connections.values():
            if connection not in self.connections:
                self.flows.watch(connection, 0)
        for connection in self.connections:
            self._begin(connection)
        next_check = 0.0
        while True:
            self.flows.send_turn()
            self._advance()
            if self.first == self.count and not any(map(self._needs, self.connections)):
                return self.stats
            self.flows.poll(0.0 if self.flows.can_send else POLL_S)
            now = time.monotonic()
            if now >= next_check:
                next_check = now + POLL_S
                self.guard.tick(self._waits_for, self._where)

    # -- beginning, opening and finishing ----------------------------------------------------------------------------

    def _begin(self, connection: Connection) -> None:
        connection.begun = False
        if connection.closed:
            raise self._lost(connection, "has closed its connection")
        self.flows.watch(connection, select.EPOLLIN | select.EPOLLRDHUP)
        self.flows.post(connection, frame(Kind.BEGIN, value=self.version, digest=self.replay.digest))
        if connection.read_by and connection.published is not self.replay:
            table = self.replay.share_table(connection.peer.rank)
            if len(table):
                payload = pack_share(self.wire.block_of(self.binding.memory), table)
                self.flows.post(connection, frame(Kind.SHARE, value=len(payload)) + payload)
            connection.published = self.replay
        self._resume(connection)

    def _advance(self) -> None:
        """Hand over, finish and open buckets, in order, as far as they are complete."""
        while True:
            while self.loaded < self.opened and not self.recv_left[self.loaded]:
                self._load(self.loaded)
                self.loaded += 1
            while self.first < self.loaded and not self.send_left[self.first]:
                self.first += 1
            if self.opened >= min(self.count, self.first + SLOTS):
                return
            self._open(self.opened)

    def _open(self, number: int) -> None:
        self.opened += 1
        bucket = self.binding.buckets[number]
        started = time.perf_counter()
        bucket.local.run()
        self.stats.seconds["pack"] += time.perf_counter() - started
        self.stats.sent["local"] += bucket.local_bytes
        self.stats.received["local"] += bucket.local_bytes
        for send, needs in zip(self.replay.sends[number], self.needs_left[number], strict=True):
            if not needs:
                self._enqueue(send)
        for recv in self.early.pop(number, ()):
            self._read_in_place(recv)
        for connection in self.connections:
            self._resume(connection)

    def _load(self, number: int) -> None:
        bucket = self.binding.buckets[number]
        if bucket.direct or bucket.whole:
            started = time.perf_counter()
            self.binding.sink.arrived(bucket.direct, bucket.whole)
            self.stats.seconds["load"] += time.perf_counter() - started

    # -- sending -----------------------------------------------------------------------------------------------------

    def _enqueue(self, send: Send) -> None:
        self.flows.enqueue(send.connection, send.outgoing, send)

    def _pack(self, send: Send) -> None:
        """Just before the first byte leaves: packing ahead would keep the other connections waiting."""
        started = time.perf_counter()
        sends = self.replay.sends[send.bucket]
        for each in (*(sends[i] for i in send.message.shares), send):
            if not each.packed:
                each.message.pack.run()
                each.packed = True
        self.stats.seconds["pack"] += time.perf_counter() - started

    def _sent(self, send: Send) -> None:
        self.stats.messages += 1
        self.stats.sent[send.connection.link] += send.message.nbytes
        if not send.in_place:
            self.send_left[send.bucket] -= 1

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _received(self, connection: Connection, memory: Memory) -> None:
        if memory is connection.header:
            self._frame(connection)
        else:
            self._complete(connection, memory)

    def _frame(self, connection: Connection) -> None:
        """Act on a complete header, or leave it and pause the connection until it can be taken."""
        kind, bucket, hop, value, digest = parse(connection.header_bytes)
        if kind == Kind.BEGIN:
            if connection.begun:
                self.flows.pause(connection)
                return
            self._check_begin(connection, value, digest)
        elif kind == Kind.SHARE:
            connection.body = Memory([memoryview(bytearray(value))])
        elif kind == Kind.DATA:
            recv = self._expected(connection, bucket, hop)
            if bucket >= self.opened:
                self.flows.pause(connection)
                return
            connection.body, connection.receiving = recv.incoming, recv
        elif kind == Kind.READY:
            self._ready(self._expected(connection, bucket, hop))
        elif kind == Kind.RELEASE:
            self.send_left[bucket] -= 1
            self.receipts[connection.peer.rank] -= 1
        elif kind == Kind.STORED:
            self.receipts[connection.peer.rank] -= 1
        connection.header.rewind()

    def _complete(self, connection: Connection, body: Memory) -> None:
        recv, connection.body, connection.receiving = connection.receiving, None, None
        if recv is not None:
            self._store(recv)
            return
        address, table = unpack_share(body.views[0])
        connection.shared = SharedStaging(open_block(address), table, self.replay.digest)
        self.replay.attach(connection)

    def _expected(self, connection: Connection, bucket: int, hop: int) -> Recv:
        recv = self.replay.expected[connection.peer.rank].get((bucket, hop))
        if recv is None:
            raise self._lost(connection, f"sent a message of bucket {bucket} and hop {hop} that is not in the program")
        return recv

    def _ready(self, recv: Recv) -> None:
        if recv.bucket >= self.opened:
            self.early.setdefault(recv.bucket, []).append(recv)
        else:
            self._read_in_place(recv)

    def _read_in_place(self, recv: Recv) -> None:
        if not recv.attached:
            raise self._lost(recv.connection, "did not say where it stages what this rank reads")
        started = time.perf_counter()
        if recv.message.relayed:
            recv.message.fetch.run()
        recv.message.unpack.run()
        self.stats.seconds["domain"] += time.perf_counter() - started
        self.flows.post(recv.connection, recv.release)
        self._stored(recv)

    def _store(self, recv: Recv) -> None:
        started = time.perf_counter()
        recv.message.unpack.run()
        self.stats.seconds["unpack"] += time.perf_counter() - started
        self._stored(recv)

    def _stored(self, recv: Recv) -> None:
        number = recv.bucket
        recv.stored = True
        self.stats.received[recv.connection.link] += recv.message.nbytes
        needs = self.needs_left[number]
        for index in recv.feeds:
            needs[index] -= 1
            if not needs[index]:
                self._enqueue(self.replay.sends[number][index])
        self.recv_left[number] -= 1
        peer = recv.connection.peer.rank
        self.awaited[peer] -= 1
        if not self.awaited[peer] and not recv.message.in_place:
            self.flows.post(recv.connection, STORED)

    def _resume(self, connection: Connection) -> None:
        """Try again to take the frame at which a connection was paused."""
        if connection.paused:
            self.flows.resume(connection)
            self._frame(connection)

    # -- failure -----------------------------------------------------------------------------------------------------

    def _check_begin(self, connection: Connection, version: int, digest: bytes) -> None:
        if digest != self.replay.digest:
            raise self._lost(connection, "runs another plan than this rank; both sides must plan anew")
        if version != self.version:
            raise self._lost(connection, f"refits version {version} while this rank refits version {self.version}")
        connection.begun = True

    def _closing(self, connection: Connection) -> None:
        """The peer has closed: fatal at once when what this rank still needs is not in its buffers."""
        missing = self.replay.bytes_missing(connection)
        if connection.outbox or self.receipts[connection.peer.rank] or missing > connection.unread():
            raise self._lost(connection, "closed its connection")
        connection.closed = True
        self.flows.watch(connection, 0 if connection.paused else select.EPOLLIN)

    def _ended(self, connection: Connection) -> None:
        """All that the peer sent before it closed has been read."""
        if self._needs(connection):
            raise self._lost(connection, "closed its connection")
        connection.closed = True
        self.flows.watch(connection, 0)

    def _needs(self, connection: Connection) -> bool:
        """Whether this refit cannot end without the peer. Its BEGIN too must be read, or it would open the next one."""
        rank = connection.peer.rank
        return bool(not connection.begun or connection.outbox or self.receipts[rank] or self.awaited[rank])

    def _waits_for(self) -> list[Connection]:
        """The peers that hold up the open buckets, those of the first bucket first."""
        found: dict[int, Connection] = {}
        for number in range(self.first, self.opened):
            for recv in self.replay.recvs[number]:
                if not recv.stored:
                    found.setdefault(recv.connection.peer.rank, recv.connection)
        for connection in filter(self._needs, self.connections):
            found.setdefault(connection.peer.rank, connection)
        return list(found.values())

    def _where(self) -> tuple[str, int]:
        blocked = self._waits_for()
        return (blocked[0].link if blocked else "load"), min(self.first, self.count - 1)

    def _lost(self, connection: Connection, what: str) -> WireError:
        return self.guard.lost(connection, what, self._where())
