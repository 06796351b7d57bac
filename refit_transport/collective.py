"""DTensor to DTensor, as one collective call: any placements, any meshes, on the ranks of a process group.

``reshard`` is a refit without trainer, engine or session: it describes, plans, connects, moves the bytes once and
disconnects. ``Resharding`` keeps the plan and the connections, for tensors that are moved again and again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout import Holding, LogicalParameter, describe, group_holdings
from refit_transport.planning import Plan, PlanOptions, compile_program, plan_refit
from refit_transport.runtime.binding import Binding
from refit_transport.trainers.dtensor_shards import Shard, read_shard
from refit_transport.trainers.tensors import TensorSource
from refit_transport.wires.base import Peer, Wire, WireStats
from refit_transport.wires.select import make_wire

Tensors = torch.Tensor | Mapping[str, torch.Tensor] | None
"""A DTensor (a plain tensor counts as a full copy), several by name, or nothing on this rank."""

Result = TypeVar("Result")


class ReshardError(RuntimeError):
    """Ranks that could not take part, with phase and cause. Raised on every rank alike."""


def reshard(
    src: Tensors,
    dst: Tensors,
    *,
    group: dist.ProcessGroup | None = None,
    domains: Sequence[Sequence[int]] | None = None,
    options: PlanOptions | None = None,
    wire: str = "auto",
    timeout_s: float = 60.0,
) -> WireStats:
    """Copies ``src`` into ``dst`` in place, element by element of the global tensors. A collective over ``group``.

    Every rank passes the tensors that it has; meshes may overlap, differ in size and numbering, and leave ranks out.
    ``domains`` lists group ranks by fast link (default: by host). dtypes may differ between floating tensors. Raises
    ReshardError on every rank if the tensors cannot be joined or a rank fails; ``dst`` is then undefined.
    """
    with Resharding(src, dst, group=group, domains=domains, options=options, wire=wire, timeout_s=timeout_s) as planned:
        return planned.run()


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank tells the others."""

    source: tuple[Holding, ...]
    sink: tuple[Holding, ...]
    host: str
    pid: int
    endpoint: dict[str, object]


class Resharding:
    """A planned and connected copy; arguments as for ``reshard``. Making it and ``run`` are collectives."""

    def __init__(
        self,
        src: Tensors,
        dst: Tensors,
        *,
        group: dist.ProcessGroup | None = None,
        domains: Sequence[Sequence[int]] | None = None,
        options: PlanOptions | None = None,
        wire: str = "auto",
        timeout_s: float = 60.0,
    ) -> None:
        self._group, self._timeout, self._version = group, timeout_s, 0
        self._rank = dist.get_rank(group)
        self._wire: Wire | None = None
        self.plan: Plan
        try:
            reports = self._together("describe", lambda: self._describe(src, dst, wire))
            digests = self._together("plan", lambda: self._plan(reports, domains, options))
            self._together("connect", lambda: self._connect(reports, digests))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> WireStats:
        """Moves the present contents of ``src`` and returns what this rank sent and received."""
        self._version += 1

        def move() -> WireStats:
            self._binding.begin(self._version)
            stats = self._wire.run(self._binding, self._version, time.monotonic() + self._timeout)
            self._sink.commit(self._version)
            return stats

        return self._together("run", move)[self._rank]  # returns when peers no longer read this rank's memory

    def close(self) -> None:
        """Disconnects this rank."""
        if self._wire is not None:
            self._wire.close()

    def _together(self, phase: str, action: Callable[[], Result]) -> list[Result]:
        """Runs ``action`` on every rank; the results by rank, or one error everywhere that names all failures."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        outcomes: list[tuple[Result, str | None]] = [None] * dist.get_world_size(self._group)  # type: ignore[list-item]
        dist.all_gather_object(outcomes, (result, failure), group=self._group)
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
        if failures:
            raise ReshardError(f"reshard failed in phase {phase} on " + "; ".join(failures[:4]))
        return [value for value, _ in outcomes]

    def _describe(self, src: Tensors, dst: Tensors, wire: str) -> _Report:
        sources, sinks = _shards(src), _shards(dst)
        self._source = TensorSource({name: shard.shape for name, shard in sources.items()}, _views(sources))
        self._sink = TensorSink(_views(sinks))
        self._wire = make_wire(wire, {})
        endpoint = self._wire.listen(self._rank)
        return _Report(_holdings(sources), _holdings(sinks), socket.gethostname(), os.getpid(), endpoint)

    def _plan(
        self, reports: list[_Report], domains: Sequence[Sequence[int]] | None, options: PlanOptions | None
    ) -> str:
        source = describe({rank: report.source for rank, report in enumerate(reports)})
        sink = describe({rank: report.sink for rank, report in enumerate(reports)})
        parameters = [LogicalParameter(e.name, source.layout_of(e).shape, e.dtype) for e in source.entries]
        self.plan = plan_refit(source, sink, parameters, domains or _by_host(reports), options)
        return self.plan.digest

    def _connect(self, reports: list[_Report], digests: list[str]) -> None:
        if len(set(digests)) > 1:
            raise ValueError(f"ranks made different plans: domains and options must be equal everywhere; got {digests}")
        domain_of = {rank: number for number, ranks in enumerate(self.plan.domains) for rank in ranks}
        peers = [
            Peer(
                rank=rank,
                role="trainer" if report.source else "engine",
                host=report.host,
                domain=domain_of[rank],
                pid=report.pid,
                incarnation=f"{report.pid}.{rank}.{digests[0][:12]}",
                endpoint=report.endpoint,
            )
            for rank, report in enumerate(reports)
        ]
        self._binding = Binding(self.plan, compile_program(self.plan, self._rank), self._source, self._sink)
        self._wire.connect(self._rank, peers, time.monotonic() + self._timeout)


def _shards(tensors: Tensors) -> dict[str, Shard]:
    if tensors is None:
        return {}
    named = tensors if isinstance(tensors, Mapping) else {"tensor": tensors}
    return {name: read_shard(name, tensor) for name, tensor in named.items()}


def _views(shards: Mapping[str, Shard]) -> dict[str, list[tuple[object, torch.Tensor]]]:
    return {
        name: [(region, shard.local[box.slices()]) for region, box in shard.boxes] for name, shard in shards.items()
    }


def _holdings(shards: Mapping[str, Shard]) -> tuple[Holding, ...]:
    """This rank's report; a rank with an empty shard still says which shape and dtype it knows."""
    parameters = [
        LogicalParameter(name, shard.shape, str(shard.local.dtype).removeprefix("torch."))
        for name, shard in shards.items()
    ]
    return group_holdings(parameters, {name: [region for region, _ in s.boxes] for name, s in shards.items()})


def _by_host(reports: Sequence[_Report]) -> list[list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        hosts.setdefault(report.host, []).append(rank)
    return list(hosts.values())
