"""The CPU wire: sockets between domains, shared memory inside one, driven by one loop in the calling thread."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from refit_transport.runtime.binding import Binding
from refit_transport.runtime.staging import Staging, host_memory

from .base import Peer, WireError, WireStats
from .shm import HEADER, Block, BlockAddress
from .tcp_calls import announce, answer, failure_text, told_error
from .tcp_connection import Connection, tune
from .tcp_exchange import Exchange
from .tcp_frames import TOKEN_BYTES, Call, Hello, Reply
from .tcp_join import Join
from .tcp_lobby import Lobby, interface_address, open_port
from .tcp_replay import Replay


class TcpWire:
    """Implements ``Wire``.

    ``host`` is the address that peers reach this rank at; ``network_interface`` and ``domain_interface`` take the
    address of an interface instead, for traffic between and inside domains. ``connect`` wants this rank's own
    ``Peer`` among ``peers``: it says which domain the rank is in.
    """

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        network_interface: str | None = None,
        domain_interface: str | None = None,
        *,
        shared_memory: bool = True,
        direct_bytes: int | None = 64 << 10,
        chunk_bytes: int = 1 << 20,
        send_buffer_bytes: int = 256 << 10,
        congestion: str | None = "reno",
        stall_s: float = 5.0,
        bytes_per_s: float = 50e6,
    ) -> None:
        self._network_host = interface_address(network_interface) if network_interface else host
        self._domain_host = interface_address(domain_interface) if domain_interface else None
        self._shared_memory, self._direct_bytes = shared_memory, direct_bytes
        self._send_buffer, self._congestion = send_buffer_bytes, congestion
        self.chunk_bytes = chunk_bytes
        """Most bytes that one destination is given before the next has its turn."""
        self.stall_s, self.bytes_per_s = stall_s, bytes_per_s
        self.connections: dict[int, Connection] = {}
        self.peers: dict[int, Peer] = {}
        self.poller: select.epoll | None = None
        self.lobby: Lobby | None = None
        self.token = b""
        self.rank = -1
        self._domain: int | None = None
        self.closed = True
        self._busy = threading.RLock()
        self._wake: int | None = None
        self._blocks: dict[int, BlockAddress] = {}
        self._staging = Staging()
        self._replay: Replay | None = None
        self._probe: Block | None = None

    def listen(self, rank: int) -> dict[str, object]:
        self.close()
        self.rank, self.token = rank, secrets.token_bytes(TOKEN_BYTES)
        self.closed = False
        self.poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller.register(self._wake, select.EPOLLIN)
        ports = [open_port(host) for host in (self._network_host, self._domain_host) if host]
        self.lobby = Lobby(ports)
        self.poller.register(self.lobby.fileno(), select.EPOLLIN)
        endpoint: dict[str, object] = {
            "network": list(ports[0].getsockname()[:2]),
            "domain": list(ports[-1].getsockname()[:2]),
            "token": self.token.hex(),
        }
        if self._shared_memory:
            self._probe = Block(HEADER)
            address = self._probe.address
            endpoint["shared"] = [address.pid, address.fd, address.nbytes, address.token.hex()]
        return endpoint

    def connect(self, rank: int, peers: Sequence[Peer], deadline: float) -> None:
        own = next((peer for peer in peers if peer.rank == rank), None)
        self._domain = own.domain if own else None
        self.peers = {peer.rank: peer for peer in peers if peer.rank != rank}
        join = Join(
            self.poller,
            rank,
            self.token,
            self.peers,
            self._domain,
            self._shared_memory,
            lambda: self.closed,
        )
        self.lobby.welcome = join.welcome
        with self._busy, self._telling():
            try:
                self.connections = join.run(self.lobby, deadline)
            except BaseException:
                join.abandon()
                raise
        self.lobby.welcome = self._welcome
        for connection in self.connections.values():
            tune(connection.sock, self._send_buffer, self._congestion)
        read_by = frozenset(r for r, c in self.connections.items() if c.read_by)
        self._staging = Staging(
            allocate=self._shared_block if read_by else host_memory,
            direct_bytes=self._direct_bytes,
            read_by=read_by,
            reads=frozenset(r for r, c in self.connections.items() if c.reads),
        )

    def run(
        self, binding: Binding, version: int, deadline: float, failed: Callable[[], str | None] = lambda: None
    ) -> WireStats:
        if self.closed:
            raise WireError("the wire is closed", phase="start")
        with self._busy, self._telling():
            binding.bind(self._staging)
            if self._replay is None or not self._replay.is_of(binding):
                self._replay = Replay(binding, self.connections)
            return Exchange(self, self._replay, version, deadline, failed).run()

    def close(self) -> None:
        """Ends a ``run`` or ``connect`` of another thread within 2 s, then releases everything."""
        self.closed = True
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)
        if not self._busy.acquire(timeout=2.0):
            raise WireError(f"rank {self.rank} is still in a refit 2 s after its wire was closed")
        try:
            self._release()
        finally:
            self._busy.release()

    def shares(self, memory: torch.Tensor) -> bool:
        """Whether ``memory`` is staging that peers may read in place."""
        return memory.data_ptr() in self._blocks

    def block_of(self, memory: torch.Tensor) -> BlockAddress:
        """Where peers find the staging that ``memory`` is."""
        return self._blocks[memory.data_ptr()]

    def _release(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections = {}
        if self.lobby is not None:
            self.lobby.close()
            self.poller.close()
            os.close(self._wake)
        self.lobby = self.poller = self._wake = self._replay = self._probe = None
        self._staging, self._blocks = Staging(), {}

    def _shared_block(self, nbytes: int) -> torch.Tensor:
        block = Block(nbytes)
        self._blocks = {block.tensor.data_ptr(): block.address}
        return block.tensor

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell every peer of an error in the block before it is raised, so that they name its cause, not this rank."""
        try:
            yield
        except Exception as error:
            peers = [(peer, peer.domain == self._domain) for peer in self.peers.values()]
            announce(peers, self.rank, self.token, failure_text(error, self.rank))
            raise

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        """Somebody calls while this rank is connected: a peer that failed, one that asks for life, or a stranger."""
        peer = self.peers.get(hello.rank)
        known = peer is not None and hello.target == self.token and hello.token.hex() == peer.endpoint["token"]
        if known and hello.call == Call.PROBE:
            answer(sock, Reply(True))
        elif hello.call == Call.JOIN:
            answer(sock, Reply(False, text=f"rank {self.rank} is connected with another membership".encode()))
        sock.close()
        if known and hello.call == Call.FAILED:
            raise told_error(hello.text)
