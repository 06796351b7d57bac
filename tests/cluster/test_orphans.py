"""A process of an engine ends with the process that started it, whenever that is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

PARENT = """
import multiprocessing, os, sys, time
from refit_transport.cluster.orphans import DIE_WITH_PARENT, die_with_parent

def child(early, out):
    parent = os.getppid()
    if early:
        die_with_parent()
    os.write(out, str(os.getpid()).encode() + b" ")
    while os.getppid() == parent:
        time.sleep(0.01)
    die_with_parent()
    os.write(out, b"survived")

os.environ[DIE_WITH_PARENT] = "1"
multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[1] == "early", int(sys.argv[2]))).start()
time.sleep(60)
"""
DEADLINE_S = 30


def read(pipe: int) -> bytes:
    ready, _, _ = select.select([pipe], [], [], DEADLINE_S)
    assert ready, "nothing came, and the pipe is still held"
    return os.read(pipe, 100)


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_process_that_asked_before_or_after_its_parent_was_killed_ends(when: str) -> None:
    pipe, there = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, when, str(there)], pass_fds=[there])
    os.close(there)
    assert int(read(pipe)) > 1
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert read(pipe) == b"", "only a process that is gone lets go of the pipe"
    os.close(pipe)
