"""A binding as this wire sends and receives it: headers and memory views, made once and replayed at each refit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from refit_transport.runtime.binding import Binding
from refit_transport.runtime.replay import BoundBucket, BoundMessage

from .tcp_connection import Connection, Memory, views_of
from .tcp_frames import Kind, frame, short_digest


@dataclass(slots=True)
class Send:
    """A message to a peer: the bytes themselves, or word that they can be read in place."""

    bucket: int
    message: BoundMessage
    connection: Connection
    outgoing: Memory
    in_place: bool
    packed: bool = False


@dataclass(slots=True)
class Recv:
    """A message from a peer. ``incoming`` is None when it is read in place."""

    bucket: int
    message: BoundMessage
    connection: Connection
    incoming: Memory | None
    release: bytes
    feeds: list[int]
    """Indices into the bucket's sends of the messages that forward from this one."""
    stored: bool = False
    attached: bool = False
    """The peer has said where it stages a message that is read in place."""


class Replay:
    """All messages of one bind. ``expected[peer][bucket, hop]`` finds a received message by its header."""

    def __init__(self, binding: Binding, connections: Mapping[int, Connection]) -> None:
        self.binding, self._generation = binding, binding.generation
        self.connections = connections
        self.digest = short_digest(binding.program.digest)
        self.sends: list[list[Send]] = []
        self.recvs: list[list[Recv]] = []
        self.most_bytes = max((_bucket_bytes(bucket) for bucket in binding.buckets), default=0)
        """Bytes that this rank sends and receives in its largest bucket."""
        self.recv_count = dict.fromkeys(connections, 0)
        self.receipts = dict.fromkeys(connections, 0)
        """Frames by which each peer confirms what it is sent: one per message that it reads in place, else one."""
        self.expected: dict[int, dict[tuple[int, int], Recv]] = defaultdict(dict)
        for number in range(len(binding.buckets)):
            self._add_bucket(number)
        for connection in connections.values():
            if connection.shared and connection.shared.digest == self.digest:
                self.attach(connection)

    def is_of(self, binding: Binding) -> bool:
        return binding is self.binding and binding.generation == self._generation

    def rewind(self) -> None:
        for send in (send for bucket in self.sends for send in bucket):
            send.outgoing.rewind()
            send.packed = False
        for recv in (recv for bucket in self.recvs for recv in bucket):
            recv.stored = False
            if recv.incoming is not None:
                recv.incoming.rewind()

    def bytes_missing(self, connection: Connection) -> int:
        """Bytes of messages that ``connection`` has yet to bring in this refit."""
        recvs = (recv for bucket in self.recvs for recv in bucket)
        return sum(recv.incoming.left for recv in recvs if recv.connection is connection and recv.incoming)

    def share_table(self, peer: int) -> np.ndarray:
        """Where the messages to ``peer`` are staged: int64 [segments, 4] of bucket, hop, offset, bytes."""
        base = self.binding.memory.data_ptr() if self.binding.memory is not None else 0
        rows = [
            (send.bucket, send.message.hop, segment.data_ptr() - base, segment.numel())
            for bucket in self.sends
            for send in bucket
            if send.message.peer == peer
            for segment in send.message.segments
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)

    def attach(self, connection: Connection) -> None:
        """Read what the peer of ``connection`` sends from its staging, which ``connection.shared`` describes."""
        segments: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        memory = connection.shared.memory
        for bucket, hop, offset, nbytes in connection.shared.table.tolist():
            segments[bucket, hop].append(memory[offset : offset + nbytes])
        for number, bucket in enumerate(self.recvs):
            for index, recv in enumerate(bucket):
                if recv.connection is connection:
                    self.binding.attach(number, index, segments[number, recv.message.hop])
                    recv.attached = True

    def _add_bucket(self, number: int) -> None:
        bound = self.binding.buckets[number]
        sends = [self._send(number, message) for message in bound.sends]
        recvs = [self._recv(number, message) for message in bound.recvs]
        for index, message in enumerate(bound.sends):
            for need in message.needs:
                recvs[need].feeds.append(index)
        for send in sends:
            peer = send.message.peer
            self.receipts[peer] = self.receipts[peer] + 1 if send.in_place else 1
        for recv in recvs:
            self.recv_count[recv.message.peer] += 1
            self.expected[recv.message.peer][number, recv.message.hop] = recv
        self.sends.append(sends)
        self.recvs.append(recvs)

    def _send(self, number: int, message: BoundMessage) -> Send:
        connection = self.connections[message.peer]
        if connection.read_by:
            ready = memoryview(frame(Kind.READY, number, message.hop))
            return Send(number, message, connection, Memory([ready]), True)
        header = memoryview(frame(Kind.DATA, number, message.hop, message.nbytes))
        return Send(number, message, connection, Memory([header, *views_of(message.segments)]), False)

    def _recv(self, number: int, message: BoundMessage) -> Recv:
        connection = self.connections[message.peer]
        incoming = None if message.in_place else Memory(views_of(message.segments))
        release = frame(Kind.RELEASE, number, message.hop)
        return Recv(number, message, connection, incoming, release, [])


def _bucket_bytes(bucket: BoundBucket) -> int:
    return sum(message.nbytes for message in (*bucket.sends, *bucket.recvs))
