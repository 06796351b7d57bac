"""The ports of a rank: who connects is heard out without blocking, and strangers are dropped without harm."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from .tcp_frames import HELLO_BYTES, Hello

PATIENCE_S = 5.0
"""A caller that has not said hello by then is dropped."""
MAX_GUESTS = 256
SIOCGIFADDR = 0x8915


def interface_address(name: str) -> str:
    """IPv4 address of a network interface. Raises OSError when there is no such interface or it has no address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(packed[20:24])


def open_port(host: str) -> socket.socket:
    """A listening, non-blocking socket on a free port of ``host``, which stays open from here on."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    port = socket.create_server((host, 0), family=family, backlog=1024)
    port.setblocking(False)
    return port


class Lobby:
    """Accepts on ``ports`` and calls ``welcome(socket, hello)`` for whoever says a proper hello; the socket is then
    ``welcome``'s. Another poller may watch ``fileno()`` and call ``serve`` when it stirs."""

    def __init__(self, ports: Sequence[socket.socket]) -> None:
        self.welcome: Callable[[socket.socket, Hello], None] = lambda sock, hello: sock.close()
        self._poller = select.epoll()
        self._ports = {port.fileno(): port for port in ports}
        self._guests: dict[int, tuple[socket.socket, bytearray, float]] = {}
        for fd in self._ports:
            self._poller.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._poller.fileno()

    def serve(self, timeout: float = 0.0) -> None:
        """Hear whoever is there, waiting up to ``timeout`` seconds for the first. Raises what ``welcome`` raises."""
        for fd, _ in self._poller.poll(timeout):
            if fd in self._ports:
                self._accept(self._ports[fd])
            elif fd in self._guests:
                self._hear(fd)
        now = time.monotonic()
        for fd in [fd for fd, (_, _, since) in self._guests.items() if now - since > PATIENCE_S]:
            self._drop(fd)

    def close(self) -> None:
        for fd in list(self._guests):
            self._drop(fd)
        for port in self._ports.values():
            port.close()
        self._ports.clear()
        self._poller.close()

    def _accept(self, port: socket.socket) -> None:
        try:
            sock, _ = port.accept()
        except OSError:
            return
        if len(self._guests) >= MAX_GUESTS:
            sock.close()
            return
        sock.setblocking(False)
        self._guests[sock.fileno()] = (sock, bytearray(), time.monotonic())
        self._poller.register(sock.fileno(), select.EPOLLIN)

    def _hear(self, fd: int) -> None:
        sock, heard, _ = self._guests[fd]
        try:
            data = sock.recv(HELLO_BYTES - len(heard) if len(heard) < HELLO_BYTES else 1 << 16)
            heard += data
            hello = Hello.parse(heard)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._drop(fd)
            return
        if hello is not None:
            self._poller.unregister(fd)
            del self._guests[fd]
            self.welcome(sock, hello)
        elif not data:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        sock, _, _ = self._guests.pop(fd)
        self._poller.unregister(fd)
        sock.close()
