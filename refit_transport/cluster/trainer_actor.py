"""The Ray actor of one trainer rank: a policy worker, and its membership of the refit session."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
from torch.distributed import TCPStore

from refit_transport.session.agreement import PlanSummary
from refit_transport.session.member import RefitMember
from refit_transport.session.report import RefitReport


class TrainerActor:
    """One rank; methods of its workers are called by name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._workers: dict[str, Any] = {}
        self._member: RefitMember | None = None
        self._store: TCPStore | None = None

    def host(self) -> str:
        return socket.gethostname()

    def pid(self) -> int:
        return os.getpid()

    def open_store(self) -> tuple[str, int]:
        """Address and port of a store for the trainers' own process group. It listens from here on, so that nobody else
        can take the port before the group is built on it."""
        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return address, self._store.port

    def start(self, classes: dict[str, type], world: int, address: str, port: int, tree: dict, timeout: float) -> None:
        """Build the rank's workers (``policy``, and ``value`` for PPO), each from its section of the configuration."""
        for name, worker_class in classes.items():
            self._workers[name] = worker_class(self.rank, world, address, port, tree[name], timeout)

    def call(self, worker: str, method: str, *args: Any) -> Any:
        """A method of a worker."""
        return getattr(self._workers[worker], method)(*args)

    def rows(self, worker: str, method: str, batch: dict[str, Any]) -> Any:
        """A method of a worker that gives float32 [rows, s] for its own rows of the batch; None on ranks that only
        repeat another's rows."""
        result = getattr(self._workers[worker], method)(batch)
        return result if self._workers[worker].tp_rank == 0 else None

    def join_refit(self, address: str, timeout: float, domain: str | None) -> PlanSummary:
        self.leave_refit()
        source = self._workers["policy"].source()
        self._member = RefitMember.join(
            address, rank=self.rank, role="trainer", source=source, timeout=timeout, domain=domain
        )
        return self._member.plan_summary()

    def refit(self, version: int, timeout: float) -> RefitReport:
        return self._member.refit(version, timeout=timeout)

    def leave_refit(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None

    def shutdown(self) -> None:
        self.leave_refit()
        for worker in self._workers.values():
            worker.shutdown()
        self._workers = {}
