"""Our own transports: plan, compile, bind, and run over a wire for CPU, without a session around it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from refit_transport.bench.config import BenchConfig
from refit_transport.bench.workload import BenchTensor, describe
from refit_transport.engines.tensors import TensorSink
from refit_transport.planning import compile_program, plan_refit
from refit_transport.planning.plan import Plan
from refit_transport.runtime.binding import Binding
from refit_transport.trainers.tensors import TensorSource
from refit_transport.transports.registry import get_transport
from refit_transport.wires.base import Peer
from refit_transport.wires.select import make_wire
from refit_transport.wires.tcp import TcpWire

from .base import RankContext

OPTIONS = {
    "nccl_reshard": ("nccl_reshard", {}),
    "gather_broadcast": ("gather_broadcast", {"root": "single"}),
    "gather_broadcast_every": ("gather_broadcast", {"root": "every"}),
}
"""Name in a benchmark to the transport and what is set for it."""


def plan_of(name: str, config: BenchConfig, tensors: tuple[BenchTensor, ...]) -> Plan:
    """The plan that a session would make with the transport's options."""
    transport, fixed = OPTIONS[name]
    chosen = get_transport(transport)
    options = {
        "scope": config.scope,
        "bucket_bytes": config.bucket_bytes,
        "relay": config.relay,
        "network_ports": "rank" if config.cluster.nic == "rank" else "domain",
        **fixed,
    }
    parameters = tuple(tensor.logical for tensor in tensors)
    whole = frozenset(parameter.name for parameter in parameters) - chosen.direct_names(parameters, options)
    return plan_refit(
        describe(tensors, "trainers"),
        describe(tensors, "engines", whole),
        parameters,
        config.cluster.domains,
        chosen.plan_options(options),
    )


class Planned:
    """One rank of a planned refit. What is timed is what a session runs between opening and committing a version."""

    def __init__(self, context: RankContext, name: str) -> None:
        self._context, self._name = context, name
        config, interfaces = context.config, context.interfaces
        self._is_engine = context.rank in config.engines.ranks
        self._deadline_seconds = config.deadline_seconds
        options = {
            "host": interfaces.address,
            "network_interface": interfaces.network,
            "domain_interface": interfaces.domain,
        }
        self._wire = make_wire(config.wire, options)

    def publish(self) -> dict[str, Any]:
        """Plans as well: what a plan takes is no memory of a refit."""
        self._plan = plan_of(self._name, self._context.config, self._context.tensors)
        self._program = compile_program(self._plan, self._context.rank)
        return {
            "role": "engine" if self._is_engine else "trainer",
            "pid": os.getpid(),
            "endpoint": self._wire.listen(self._context.rank),
        }

    def connect(self, published: Mapping[int, dict[str, Any]]) -> None:
        context = self._context
        plan = self._plan
        source, sink = context.source, context.sink
        self._sink = TensorSink(sink.held()) if sink.tensors else None
        self._binding = Binding(
            plan,
            self._program,
            source=TensorSource(source.shapes, source.held()) if source.tensors else None,
            sink=self._sink,
        )
        home = {rank: number for number, domain in enumerate(plan.domains) for rank in domain}
        peers = [
            Peer(rank, said["role"], socket.gethostname(), home[rank], said["pid"], str(said["pid"]), said["endpoint"])
            for rank, said in published.items()
        ]
        self._wire.connect(context.rank, peers, time.monotonic() + self._deadline_seconds)

    def run(self, version: int) -> dict[str, Any]:
        self._binding.begin(version)
        stats = self._wire.run(self._binding, version, time.monotonic() + self._deadline_seconds)
        if self._sink is not None:
            self._sink.commit(version)
        return {
            "sent": dict(stats.sent),
            "received": dict(stats.received),
            "messages": stats.messages,
            "seconds": dict(stats.seconds),
            "staged_bytes": self._binding.peak_extra_bytes,
            "shared_bytes": self._shared_bytes(),
        }

    def _shared_bytes(self) -> int:
        """Of its staging, what peers read in place."""
        memory = self._binding.memory
        shared = isinstance(self._wire, TcpWire) and memory is not None and self._wire.shares(memory)
        return memory.numel() if shared else 0

    def close(self) -> None:
        self._wire.close()
