"""Short calls from rank to rank beside the data: to tell of a failed refit, and to ask a silent peer for life."""

from __future__ import annotations

import errno
import json
import select
import socket
import time
from collections.abc import Iterable

from .base import Peer, WireError
from .tcp_frames import REPLY_BYTES, Call, Hello, Reply

ANNOUNCE_S = 0.3
"""Longest time to tell the peers of a failure before raising it."""
MAX_TEXT = 8192


def address_of(peer: Peer, domain: bool) -> tuple[str, int]:
    """Where a peer listens for ranks of its own domain, or for others."""
    host, port = peer.endpoint["domain" if domain else "network"]
    return str(host), int(port)


def start_call(peer: Peer, domain: bool) -> socket.socket:
    """A non-blocking socket on its way to ``peer``: writable once it is there. Raises OSError."""
    host, port = address_of(peer, domain)
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex((host, port))
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, errno.errorcode.get(code, ""))
    return sock


def failure_text(error: BaseException, teller: int) -> bytes:
    """What a rank tells its peers of ``error``: the peer to blame (itself unless the error says), where and why."""
    known = isinstance(error, WireError)
    blamed = error.peer if known and error.peer is not None else teller
    said = str(error) if known else f"rank {teller} failed: {type(error).__name__}: {error}"
    bucket, phase = (error.bucket, error.phase) if known else (None, "load")
    return json.dumps({"peer": blamed, "phase": phase, "bucket": bucket, "text": said[:MAX_TEXT]}).encode()


def told_error(text: bytes) -> WireError:
    """The error that a peer told of. Raises ValueError for a text that no rank sends."""
    told = json.loads(text)
    return WireError(told["text"], peer=told["peer"], phase=told["phase"], bucket=told["bucket"])


def announce(peers: Iterable[tuple[Peer, bool]], rank: int, token: bytes, text: bytes) -> None:
    """Tell every peer (and whether it is of this domain) that the refit failed; those that are gone are left out."""
    poller = select.poll()
    calls: dict[int, tuple[socket.socket, bytes]] = {}
    for peer, domain in peers:
        target = bytes.fromhex(str(peer.endpoint["token"]))
        try:
            sock = start_call(peer, domain)
        except OSError:
            continue
        calls[sock.fileno()] = (sock, Hello(Call.FAILED, rank, token, target, text=text).pack())
        poller.register(sock.fileno(), select.POLLOUT)
    until = time.monotonic() + ANNOUNCE_S
    while calls and (left := until - time.monotonic()) > 0:
        for fd, _ in poller.poll(left * 1000):
            sock, hello = calls.pop(fd)
            poller.unregister(fd)
            try:
                sock.send(hello)
            except OSError:
                pass
            sock.close()
    for sock, _ in calls.values():
        sock.close()


class Probe:
    """Asks one peer whether it still works on the refit."""

    def __init__(self, peer: Peer, domain: bool, rank: int, token: bytes) -> None:
        self.answered = False
        self._hello = Hello(Call.PROBE, rank, token, bytes.fromhex(str(peer.endpoint["token"]))).pack()
        try:
            self._sock: socket.socket | None = start_call(peer, domain)
        except OSError:
            self._sock = None

    def look(self) -> bool:
        """Whether the peer has answered by now. Never blocks."""
        if self._sock is None:
            return self.answered
        try:
            if self._hello:
                self._sock.send(self._hello)
                self._hello = b""
            reply = self._sock.recv(REPLY_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EAGAIN):
                self.close()
            return False
        try:
            self.answered = Reply.parse(reply) is not None
        except ValueError:
            self.answered = False
        self.close()
        return self.answered

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def answer(sock: socket.socket, reply: Reply) -> bool:
    """Send a reply, which always fits into the buffer of a fresh socket. False when the caller is gone."""
    try:
        sock.send(reply.pack())
    except OSError:
        return False
    return True
