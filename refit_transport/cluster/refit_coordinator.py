"""Drives refits over trainer and engine actors: one session per membership, both sides awaited together."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray

from refit_transport.session.agreement import PlanSummary
from refit_transport.session.control_server import ControlServer
from refit_transport.session.errors import RefitError
from refit_transport.session.report import RefitReport

from .awaiting import await_all
from .engine_group import EngineGroup
from .errors import ClusterError
from .trainer_group import TrainerGroup

log = logging.getLogger("refit_transport")
refit_log = logging.getLogger("refit_transport.refit")

_GRACE = 10.0
"""Seconds beyond a refit's own deadline after which actors that still do not answer are taken for hung."""


class RefitCoordinator:
    """Implements ``rl.protocols.Refit``. ``options`` are the session's settings (``session_options``)."""

    def __init__(self, trainers: TrainerGroup, engines: EngineGroup, options: Mapping[str, Any]) -> None:
        self._trainers, self._engines, self._options = trainers, engines, dict(options)
        self._timeout = float(options["timeout_s"])
        self._server: ControlServer | None = None

    def connect(self) -> None:
        """Begin a session over all actors: join, describe, plan, connect. Raises RefitError with the first cause."""
        self.disconnect()
        layout = self._engines.layout
        host = ray.util.get_node_ip_address() if self._spans_hosts() else "127.0.0.1"
        self._server = ControlServer(layout.world_size, self._options, host=host)
        near, far = self._domains()
        calls = [
            (name, actor.join_refit.remote(self._server.address, self._timeout, domain))
            for name, actor, domain in zip(self._trainers.names, self._trainers.actors, near, strict=True)
        ]
        calls += [
            (
                name,
                actor.join_refit.remote(self._server.address, layout.rank_offset(core.replica), self._timeout, domain),
            )
            for core, name, actor, domain in zip(
                layout.cores, self._engines.names, self._engines.actors, far, strict=True
            )
        ]
        started = time.monotonic()
        plan: PlanSummary = self._await(calls, "joining the refit session")[0]
        log.info(
            "refit session: %d ranks joined, planned and connected in %.1f s, transport %s",
            layout.world_size,
            time.monotonic() - started,
            self._options["transport"],
        )
        log.info(plan.line())

    def refit(self, version: int) -> RefitReport:
        """Bring every engine to ``version``. Raises RefitError; the session is over then (``connect`` begins a new
        one)."""
        if self._server is None:
            self.connect()
        calls = self._trainers.calls("refit", version, self._timeout)
        calls += self._engines.calls("refit", version, self._timeout)
        report: RefitReport = self._await(calls, f"refitting to version {version}")[0]
        refit_log.log(logging.INFO if report.unchanged_since is None else logging.WARNING, report.line())
        return report

    def _domains(self) -> tuple[list[str | None], list[str | None]]:
        """The fast-link domain of every trainer and engine actor; None leaves it to the rank (its host). With a segment
        size, so many hosts, in the order of their names, share one."""
        sides = (self._trainers, self._engines)
        size = self._options.get("segment_size")
        if not size:
            return tuple([None] * len(side.actors) for side in sides)
        hosts = [await_all(side.calls("host"), "asking for hosts", self._timeout) for side in sides]
        order = sorted({host for side in hosts for host in side})
        return tuple([f"segment {order.index(host) // size}" for host in side] for side in hosts)

    def _await(self, calls: list[tuple[str, ray.ObjectRef]], doing: str) -> list[Any]:
        try:
            return await_all(calls, doing, self._timeout + _GRACE)
        except ClusterError as error:
            known = self._server.failure
            self._server.fail(str(error))
            self._drain(calls)
            self.disconnect()
            raise RefitError(f"{doing}: {known}" if known else str(error)) from error

    def _drain(self, calls: list[tuple[str, ray.ObjectRef]]) -> None:
        """The others learn of the failure from the control server; give them a moment to leave their transfers."""
        ray.wait([ref for _, ref in calls], num_returns=len(calls), timeout=5)

    def _spans_hosts(self) -> bool:
        return sum(node["Alive"] for node in ray.nodes()) > 1

    def disconnect(self) -> None:
        """End the session; actors keep their last committed weights."""
        if self._server is not None:
            self._server.close()
            self._server = None
