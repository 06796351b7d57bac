"""How the data-parallel cores of one engine find each other. Each is a vLLM ``LLM`` in an actor of its own."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from .errors import ClusterError

PORTS = range(7000, 9000)
"""Below the ports that the system gives to connections, so that a port stays free until vLLM listens on it."""
PORTS_PER_ENGINE = 4
"""vLLM counts up from the one it is given, for each group that the cores form."""
ENGINES = 64
"""So many have ports of their own, several choices each."""


def core_env(rank: int, size: int, host: str, port: int) -> dict[str, str]:
    """Environment of core ``rank`` of ``size``; ``host`` and ``port`` are those of core 0. The local rank picks
    devices, and an actor sees its own alone."""
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": "0",
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": host,
        "VLLM_DP_MASTER_PORT": str(port),
    }


def free_port(engine: int = 0) -> int:
    """The first of ``PORTS_PER_ENGINE`` consecutive ports that nobody uses on this host. Engines choose among different
    ones: between the choice and vLLM's listening others may look at the same ports. Raises ClusterError when none are
    found."""
    share = engine % ENGINES * PORTS_PER_ENGINE
    firsts = range(PORTS.start + share, PORTS.stop - PORTS_PER_ENGINE + 1, ENGINES * PORTS_PER_ENGINE)
    for first in random.sample(firsts, len(firsts)):
        with ExitStack() as sockets:
            try:
                for port in range(first, first + PORTS_PER_ENGINE):
                    sockets.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        return first
    raise ClusterError(
        f"engine {engine}: no {PORTS_PER_ENGINE} free ports in a row among its share of "
        f"{PORTS.start}-{PORTS.stop - 1} on this host"
    )
