"""Timing on a shared machine: real-time priority for the timed part, one clock, and how busy others were."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIORITY = 1
AUTOGROUP_NICE = -15


@contextmanager
def prioritised() -> Iterator[str]:
    """Run every thread of this process before ordinary work, and undo it at the end. Yields how: ``fifo``,
    ``autogroup`` (where real-time scheduling is refused), or ``none``."""
    how = _raise_priority()
    try:
        yield how
    finally:
        if how == "fifo":
            _schedule(os.SCHED_OTHER, 0)
        elif how == "autogroup":
            _autogroup(0)


def _raise_priority() -> str:
    try:
        _schedule(os.SCHED_FIFO, PRIORITY)
        return "fifo"
    except OSError:
        return "autogroup" if _autogroup(AUTOGROUP_NICE) else "none"


def _schedule(policy: int, priority: int) -> None:
    """Threads that the process already has are not covered by a call for the process: each is set by itself."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
        except ProcessLookupError:
            continue


def _autogroup(nice: int) -> bool:
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except OSError:
        return False
    return True


class MemorySpan:
    """Memory that this process takes of its own from here on: not the pages of files, nor other processes' shared
    memory, which it only reads."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size
        self._resident, self._foreign = _status("VmRSS"), _mapped()

    def growth(self) -> int:
        """Bytes of private memory at most so far, over those at the start; at least 0."""
        return max(0, _status("VmHWM") - self._resident - max(0, _mapped() - self._foreign))


def private_memory() -> int:
    """Bytes of anonymous memory that are resident and in use. Pages that the C library's heap holds free are given back
    first (glibc): temporary arrays leave up to some MB of them, more after one refit than after another."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return _status("RssAnon")


def _mapped() -> int:
    return _status("RssFile") + _status("RssShmem")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
