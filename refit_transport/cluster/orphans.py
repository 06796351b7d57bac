"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1

DIE_WITH_PARENT = "REFIT_TRANSPORT_DIE_WITH_PARENT"
"""Set by an engine actor: vLLM's own processes then end with it. A killed actor would else leave them behind, idle."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing), and end now if it has."""
    if os.environ.get(DIE_WITH_PARENT) and hasattr(signal, "SIGKILL"):
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        except (AttributeError, OSError):
            return
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != os.getppid():
            os.kill(os.getpid(), signal.SIGKILL)
