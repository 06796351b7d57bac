"""The ports of a rank: who connects is heard out without blocking, and strangers are dropped without harm."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import time
from collections.abc import Callable

from .tcp_frames import HELLO_BYTES, Hello, Reply

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
    """Accepts on ``ports`` and calls ``welcome(socket, hello)`` for whoever says a proper hello."""

    def __init__(
        self, poller: select.epoll, ports: list[socket.socket], welcome: Callable[[socket.socket, Hello], None]
    ) -> None:
        self._poller, self.welcome = poller, welcome
        self._ports = {port.fileno(): port for port in ports}
        self._guests: dict[int, tuple[socket.socket, bytearray, float]] = {}
        for fd in self._ports:
            poller.register(fd, select.EPOLLIN)

    def owns(self, fd: int) -> bool:
        return fd in self._ports or fd in self._guests

    def serve(self, fd: int) -> None:
        if fd in self._ports:
            self._accept(self._ports[fd])
        else:
            self._hear(fd)

    def drop_silent(self) -> None:
        """Drop callers that have said nothing for too long."""
        now = time.monotonic()
        for fd, (_, _, since) in list(self._guests.items()):
            if now - since > PATIENCE_S:
                self._drop(fd)

    def close(self) -> None:
        for fd in list(self._guests):
            self._drop(fd)
        for port in self._ports.values():
            port.close()
        self._ports.clear()

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
            data = sock.recv(HELLO_BYTES if len(heard) < HELLO_BYTES else 1 << 16)
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


def answer(sock: socket.socket, reply: Reply) -> bool:
    """Send a reply, which always fits into the buffer of a fresh socket. False when the caller is gone."""
    try:
        sock.send(reply.pack())
    except OSError:
        return False
    return True
