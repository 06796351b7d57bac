"""Connects a rank with its peers: lower ranks call higher ones, each proves which incarnation it is."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping

from .base import Peer, WireError
from .shm import BlockAddress, open_block
from .tcp_calls import answer, start_call, told_error
from .tcp_connection import Connection
from .tcp_frames import REPLY_BYTES, Call, Hello, Reply
from .tcp_lobby import Lobby

POLL_S = 0.2


def can_read(peer: Peer) -> bool:
    """Whether this process can map memory of ``peer``: tried on the block it published."""
    shared = peer.endpoint.get("shared")
    if not shared:
        return False
    pid, fd, nbytes, token = shared
    try:
        open_block(BlockAddress(pid, fd, nbytes, bytes.fromhex(token)))
    except OSError:
        return False
    return True


class Join:
    """Collects one connection per peer, all at once, in the calling thread."""

    def __init__(
        self,
        poller: select.epoll,
        rank: int,
        token: bytes,
        peers: Mapping[int, Peer],
        domain: int | None,
        shared_memory: bool,
        closed: Callable[[], bool],
    ) -> None:
        self.poller, self.rank, self.token, self.peers = poller, rank, token, peers
        self.domain, self.shared_memory, self.closed = domain, shared_memory, closed
        self.connections: dict[int, Connection] = {}
        self._calls: dict[int, tuple[socket.socket, Peer, bool, bytearray]] = {}

    def welcome(self, sock: socket.socket, hello: Hello) -> None:
        """A caller said hello: take it in when it is a peer that is awaited, refuse it with a reason otherwise."""
        peer = self.peers.get(hello.rank)
        if hello.call == Call.FAILED and hello.target == self.token and peer is not None:
            sock.close()
            raise told_error(hello.text)
        reason = self._objection(hello, peer)
        reads = False
        if not reason:
            near = peer.domain == self.domain
            reads = near and self.shared_memory and can_read(peer)
        accepted = answer(sock, Reply(not reason, reads, reason.encode()))
        if reason or not accepted:
            sock.close()
            return
        self.connections[peer.rank] = Connection(sock, peer, domain=near, reads=reads, read_by=hello.reads_staging)

    def run(self, lobby: Lobby, deadline: float) -> dict[int, Connection]:
        for peer in self.peers.values():
            if peer.rank > self.rank:
                self._call(peer)
        while len(self.connections) < len(self.peers):
            if self.closed():
                raise WireError("the wire was closed while connecting", phase="connect")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            for fd, event in self.poller.poll(min(left, POLL_S)):
                if fd in self._calls:
                    self._progress(fd, event)
                else:
                    lobby.serve()
        return self.connections

    def abandon(self) -> None:
        """Close everything that was opened."""
        for sock, *_ in self._calls.values():
            sock.close()
        for connection in self.connections.values():
            connection.sock.close()

    def _objection(self, hello: Hello, peer: Peer | None) -> str:
        if hello.call != Call.JOIN:
            return f"rank {self.rank} is connecting, no refit is running"
        if peer is None:
            return f"rank {hello.rank} is not a peer of rank {self.rank}"
        if hello.target != self.token:
            return f"rank {self.rank} is now another incarnation than the one that rank {hello.rank} looks for"
        if hello.token.hex() != peer.endpoint["token"]:
            return f"rank {self.rank} expects another incarnation of {peer}"
        if hello.rank in self.connections:
            return f"{peer} is connected already"
        return ""

    def _call(self, peer: Peer) -> None:
        try:
            sock = start_call(peer, peer.domain == self.domain)
        except OSError as error:
            raise self._unreachable(peer, error.errno) from error
        self._calls[sock.fileno()] = (sock, peer, False, bytearray())
        self.poller.register(sock.fileno(), select.EPOLLOUT)

    def _progress(self, fd: int, event: int) -> None:
        sock, peer, reads, heard = self._calls[fd]
        if event & select.EPOLLOUT:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise self._unreachable(peer, code)
            reads = peer.domain == self.domain and self.shared_memory and can_read(peer)
            target = bytes.fromhex(str(peer.endpoint["token"]))
            sock.send(Hello(Call.JOIN, self.rank, self.token, target, reads).pack())
            self._calls[fd] = (sock, peer, reads, heard)
            self.poller.modify(fd, select.EPOLLIN)
            return
        try:
            # Not a byte more than the reply: the peer's first frames may be right behind it.
            data = sock.recv(REPLY_BYTES - len(heard) if len(heard) < REPLY_BYTES else 1 << 16)
            heard += data
            reply = Reply.parse(heard)
        except (OSError, ValueError) as error:
            raise WireError(f"{peer} at {sock_name(peer)}: {error}", peer=peer.rank, phase="connect") from error
        if reply is None and not data:
            raise WireError(f"{peer} hung up while connecting", peer=peer.rank, phase="connect")
        if reply is not None:
            self._accepted(fd, reply)

    def _accepted(self, fd: int, reply: Reply) -> None:
        sock, peer, reads, _ = self._calls.pop(fd)
        self.poller.unregister(fd)
        near = peer.domain == self.domain
        self.connections[peer.rank] = Connection(sock, peer, domain=near, reads=reads, read_by=reply.reads_staging)
        if not reply.accepted:
            raise WireError(f"{peer} refused: {reply.text.decode()}", peer=peer.rank, phase="connect")

    def _unreachable(self, peer: Peer, code: int) -> WireError:
        text = f"cannot reach {peer} at {sock_name(peer)}: {os.strerror(code)}"
        return WireError(text, peer=peer.rank, phase="connect")

    def _late(self) -> WireError:
        missing = [peer for rank, peer in sorted(self.peers.items()) if rank not in self.connections]
        text = f"no connection with {', '.join(map(str, missing))} before the deadline"
        return WireError(text, peer=missing[0].rank, phase="connect")


def sock_name(peer: Peer) -> str:
    return ":".join(map(str, peer.endpoint["network"]))
