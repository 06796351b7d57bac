"""The Ray actor of one trainer rank: a policy worker, and its membership of the refit session."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
from torch.distributed import TCPStore

from refit_transport.session.member import RefitMember
from refit_transport.session.report import RefitReport


class TrainerActor:
    """One rank. ``worker_class`` is a policy worker; its methods are called by name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._worker: Any = None
        self._member: RefitMember | None = None
        self._store: TCPStore | None = None

    def identity(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def open_store(self) -> tuple[str, int]:
        """Address and port of a store for the trainers' own process group. It listens from here on, so that nobody else
        can take the port before the group is built on it."""
        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return address, self._store.port

    def start(self, worker_class: type, *args: Any, **kwargs: Any) -> None:
        """Build the worker (loads the model, joins the trainers' process group)."""
        self._worker = worker_class(*args, **kwargs)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the worker."""
        return getattr(self._worker, method)(*args)

    def rows(self, method: str, batch: dict[str, Any]) -> Any:
        """A method of the worker that gives float32 [rows, s] for its own rows of the batch; None on ranks that only
        repeat another's rows."""
        result = getattr(self._worker, method)(batch)
        return result if self._worker.tp_rank == 0 else None

    def join_refit(self, address: str, timeout: float, domain: str | None) -> None:
        self.leave_refit()
        self._member = RefitMember.join(
            address, rank=self.rank, role="trainer", source=self._worker.source(), timeout=timeout, domain=domain
        )

    def refit(self, version: int, timeout: float) -> RefitReport:
        return self._member.refit(version, timeout=timeout)

    def leave_refit(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None

    def shutdown(self) -> None:
        self.leave_refit()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
