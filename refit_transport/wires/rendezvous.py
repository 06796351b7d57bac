"""Where the ranks of a torch process group meet: a store that rank 0 hosts, open from ``listen`` until ``close``."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Timer

import torch.distributed as dist

from .base import Peer, WireError


class Meeting:
    """One rank's view of the store. ``interface`` is the network device whose address rank 0 publishes."""

    def __init__(self, interface: str | None = None) -> None:
        self._interface = interface
        self._store: dist.TCPStore | None = None
        self._hosts = False

    def host(self, rank: int) -> dict[str, object]:
        """What this rank publishes: on rank 0 the address of the store, which is up from now on."""
        if rank != 0:
            return {}
        host = address_of(self._interface)
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._hosts = True
        return {"host": host, "port": self._store.port}

    def store(self, peers: Sequence[Peer], deadline: float) -> dist.Store:
        """The store, under a prefix of this membership. Raises WireError when rank 0's cannot be reached in time."""
        root = min(peers, key=lambda peer: peer.rank)
        if self._store is None:
            left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
            try:
                self._store = dist.TCPStore(root.endpoint["host"], root.endpoint["port"], is_master=False, timeout=left)
            except RuntimeError as error:
                raise WireError(f"no store at {root}: {error}", peer=root.rank, phase="connect") from error
        return dist.PrefixStore(root.incarnation, self._store)

    def close(self, after: float = 0.0) -> None:
        """Leave the store. With ``after`` the host keeps it open for so many seconds: the other ranks still look there
        for who held up the refit."""
        if self._hosts and after:
            keep = Timer(after, lambda store: None, [self._store])
            keep.daemon = True
            keep.start()
        self._store = None


def address_of(interface: str | None) -> str:
    """IPv4 address of a network device, or of the one that leads out of this host when None (the loopback if there is
    none). Raises ValueError with the devices there are."""
    if interface is None:
        return _outward_address()
    import psutil

    for address in psutil.net_if_addrs().get(interface, []):
        if address.family.name == "AF_INET":
            return address.address
    raise ValueError(f"network interface {interface!r} has no IPv4 address; there are {sorted(psutil.net_if_addrs())}")


def _outward_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # an address of no host: connecting a datagram socket sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
