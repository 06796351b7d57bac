"""The emulated cluster: counters are exact, rates hold, and namespaces go whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from refit_transport.bench.netlab import NAMESPACES, PREFIX, Lab, parse_rate, remove_stale, run_inside

NBYTES = 16 << 20


def namespaces_of(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{PREFIX}{pid}-*")] if NAMESPACES.is_dir() else []


def stream(lab: Lab, source: int, target: int) -> float:
    """Send ``NBYTES`` from card to card; returns seconds."""
    listener = run_inside([lab.namespace(target)], lambda: socket.create_server((lab.address(target), 0)))[0]
    sender = run_inside([lab.namespace(source)], lambda: socket.create_connection(listener.getsockname()))[0]
    receiver, _ = listener.accept()
    started = time.monotonic()
    thread = threading.Thread(target=lambda: (sender.sendall(bytes(NBYTES)), sender.close()))
    thread.start()
    left, block = NBYTES, bytearray(1 << 20)
    while left:
        left -= receiver.recv_into(block)
    seconds = time.monotonic() - started
    thread.join()
    receiver.close()
    listener.close()
    return seconds


@pytest.mark.netns
def test_counters_are_exact_and_the_rate_holds():
    with Lab(3, 1e9) as lab:
        before = lab.counters()
        seconds = stream(lab, 0, 1)
        moved = [after.since(then) for then, after in zip(before, lab.counters(), strict=True)]
        assert lab.drops() == 0
    # The handshake's options add 8 bytes; everybody else's card sees at most a flooded frame.
    assert abs(moved[0].sent_payload - NBYTES) <= 64
    assert abs(moved[1].received_payload - NBYTES) <= 64
    assert moved[2].sent_payload == 0
    assert moved[2].received_payload <= 64
    assert seconds >= 0.95 * NBYTES * 8 / 1e9, "a shaped card cannot be faster than its rate"


@pytest.mark.netns
def test_the_fast_network_of_a_domain_is_not_counted():
    with Lab(2, 1e8, [[0, 1]]) as lab:
        before = lab.counters()
        address = "10.78.0.2"
        listener = run_inside([lab.namespace(1)], lambda: socket.create_server((address, 0)))[0]
        sender = run_inside([lab.namespace(0)], lambda: socket.create_connection(listener.getsockname()))[0]
        sender.close()
        listener.close()
        moved = [after.since(then) for then, after in zip(before, lab.counters(), strict=True)]
    assert all(card.sent == 0 for card in moved)


@pytest.mark.netns
def test_namespaces_go_after_an_error():
    with pytest.raises(RuntimeError, match="boom"), Lab(2, None):
        assert len(namespaces_of(os.getpid())) == 3
        raise RuntimeError("boom")
    assert namespaces_of(os.getpid()) == []


@pytest.mark.netns
def test_what_a_killed_process_left_is_removed_by_the_next():
    script = "import sys\nfrom refit_transport.bench.netlab import Lab\n"
    script += "with Lab(2, None):\n    print('up', flush=True)\n    sys.stdin.read()\n"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = namespaces_of(child.pid)
    assert len(left) == 3
    assert set(left) <= set(remove_stale())
    assert namespaces_of(child.pid) == []


@pytest.mark.parametrize(("text", "rate"), [("2gbit", 2e9), ("0.5 gbit", 5e8), ("500mbit", 5e8), ("8kbit", 8e3)])
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "2", "0gbit", "-1gbit", "2gbyte"])
def test_a_rate_that_is_none_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match="allowed: a positive number with gbit"):
        parse_rate(text)
