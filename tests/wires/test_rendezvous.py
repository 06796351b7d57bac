"""Ranks find each other's store at an address that other hosts can reach, or hear in time that they cannot."""

from __future__ import annotations

import time

import psutil
import pytest

from refit_transport.wires.base import Peer, WireError
from refit_transport.wires.rendezvous import Meeting, address_of


def test_the_default_address_is_one_of_this_host_and_not_the_loopback_if_there_is_another() -> None:
    own = {a.address for found in psutil.net_if_addrs().values() for a in found if a.family.name == "AF_INET"}
    assert address_of(None) in own


def test_an_interface_is_looked_up_by_name() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"'ib7' has no IPv4 address; there are \[.*'lo'"):
        address_of("ib7")


def test_a_store_that_is_not_there_is_an_error_in_time_that_names_its_host() -> None:
    gone = Meeting("lo")
    endpoint = gone.host(0)
    gone.close()
    peers = [Peer(rank, "trainer", "elsewhere", 0, 7, "1", endpoint if rank == 0 else {}) for rank in (0, 1)]
    started = time.monotonic()
    with pytest.raises(WireError, match=r"no store at trainer rank 0 \(pid 7 on elsewhere\)") as error:
        Meeting("lo").store(peers, started + 1.0)
    assert error.value.peer == 0 and error.value.phase == "connect"
    assert time.monotonic() - started < 5.0


def test_a_host_that_gave_up_keeps_its_store_open_for_a_while() -> None:
    host, guest = Meeting("lo"), Meeting("lo")
    peers = [Peer(0, "trainer", "h", 0, 7, "1", host.host(0)), Peer(1, "engine", "h", 0, 8, "2")]
    store = host.store(peers, time.monotonic() + 5)
    store.set("state", "said")
    del store
    host.close(after=5.0)
    assert guest.store(peers, time.monotonic() + 5).get("state") == b"said"
