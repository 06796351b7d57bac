"""The control connection: gathers, deadlines that name the missing, failures that reach everyone at once."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from refit_transport.session.control_client import ControlClient
from refit_transport.session.control_server import ControlServer
from refit_transport.session.errors import HandshakeError, RefitError


@pytest.fixture
def server():
    control = ControlServer(3, {"scope": "ffn"})
    yield control
    control.close()


def join(server, rank, seconds=5.0):
    return ControlClient(server.address, rank, f"trainer rank {rank}", time.monotonic() + seconds)


def on_all(clients, call):
    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(call, client) for client in clients]
        return [f.exception(timeout=10) or f.result() for f in futures]


def news_of(client, seconds=5.0):
    """The failure that ``client`` hears of, waiting for it."""
    deadline = time.monotonic() + seconds
    while client.failed() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return client.failed()


def test_members_receive_the_sessions_options(server):
    assert join(server, 0).options == {"scope": "ffn"}


def test_gather_gives_every_member_all_payloads_by_rank(server):
    clients = [join(server, r) for r in (2, 0, 1)]
    for turn in range(3):
        seen = on_all(clients, lambda c, t=turn: c.all_gather("step", bytes([c.rank, t]), 5))
        assert seen == [[bytes([r, turn]) for r in range(3)]] * 3


def test_payloads_larger_than_socket_buffers_arrive_whole(server):
    clients = [join(server, r) for r in range(3)]
    blobs = [os.urandom(3 << 20) for _ in range(3)]
    assert on_all(clients, lambda c: c.all_gather("big", blobs[c.rank], 20)) == [blobs] * 3


def test_a_gather_that_times_out_names_the_missing_rank_and_its_phase(server):
    clients = [join(server, r) for r in range(3)]
    clients[2].phase("loading the model")
    errors = on_all(clients[:2], lambda c: c.all_gather("holdings", b"", 0.3))
    for error in errors:
        assert isinstance(error, RefitError)
        assert "holdings was not reached within 0.3 s by trainer rank 2 (in phase loading the model)" in str(error)


def test_a_rank_that_never_joined_is_named(server):
    error = on_all([join(server, 0)], lambda c: c.all_gather("hello", b"", 0.3))[0]
    assert "rank 1 (never joined), rank 2 (never joined)" in str(error)


def test_a_killed_process_is_reported_to_all_others_within_a_second(server):
    clients = [join(server, r) for r in (0, 1)]
    pid = os.fork()
    if pid == 0:
        child = join(server, 2)
        child.phase("refit to version 7")
        time.sleep(60)
        os._exit(0)
    waiting = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    waiting.start()
    started = time.monotonic()
    errors = on_all(clients, lambda c: c.all_gather("landed", b"", 30))
    os.waitpid(pid, 0)
    assert time.monotonic() - started < 2
    assert {str(e) for e in errors} == {
        "trainer rank 2 was lost during refit to version 7 (its control connection closed)"
    }


def test_the_first_failure_is_what_everybody_reports(server):
    clients = [join(server, r) for r in range(3)]
    clients[1].fail("engine rank 1 failed while planning: no gate_proj")
    assert news_of(clients[2]) is not None
    clients[2].fail("a later one")
    assert news_of(clients[0]) == "engine rank 1 failed while planning: no gate_proj"
    with pytest.raises(RefitError, match="no gate_proj"):
        clients[0].all_gather("plan", b"", 5)


def test_a_member_that_left_fails_the_next_gather_at_once(server):
    clients = [join(server, r) for r in range(3)]
    clients[2].close()
    started = time.monotonic()
    errors = on_all(clients[:2], lambda c: c.all_gather("refit", b"", 30))
    assert time.monotonic() - started < 2
    assert all("trainer rank 2 left the session" in str(e) for e in errors)


def test_a_rank_cannot_be_taken_twice(server):
    first = join(server, 1)
    with pytest.raises(RefitError, match="rank 1 is already taken by trainer rank 1"):
        join(server, 1)
    assert news_of(first) is not None


def test_foreign_connections_disturb_nobody(server):
    endpoint = server.address.partition("#")[0]
    host, port = endpoint.split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(noise)
    with pytest.raises(RefitError, match="address is of another session"):
        ControlClient(f"{endpoint}#wrongtoken", 0, "x", time.monotonic() + 1)
    clients = [join(server, r) for r in range(3)]
    assert on_all(clients, lambda c: c.all_gather("hello", b"", 5)) == [[b""] * 3] * 3


def test_a_wrong_address_is_refused_with_its_form():
    with pytest.raises(HandshakeError, match="expected host:port#token"):
        ControlClient("localhost:1", 0, "x", time.monotonic() + 1)


def test_no_server_is_an_error_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(HandshakeError, match="no control server"):
        ControlClient(f"127.0.0.1:{port}#t", 0, "x", time.monotonic() + 0.5)
    assert time.monotonic() - started < 3


def test_a_lost_coordinator_is_seen_by_members():
    control = ControlServer(2)
    client = ControlClient(control.address, 0, "trainer rank 0", time.monotonic() + 5)
    control.close()
    with pytest.raises(RefitError, match="coordinator was lost"):
        client.all_gather("hello", b"", 5)
