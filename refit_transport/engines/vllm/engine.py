"""vLLM's weight-transfer engine of one worker: joins the refit session and receives each refit in one call.

Two rules of vLLM shape it. Between its calls an engine may compute, so the whole refit happens inside
``update_weights`` and the calls around it do nothing. And its front end reads replies in the order of the ranks and
stops at the first error, leaving later replies in the queues; so of the workers of one engine only the last raises.

The prefix cache lies in vLLM's engine core, out of a worker's reach: whoever drives the engine calls
``reset_prefix_cache`` after each refit, as ``ReshardTrainerEngine`` and the engine actor do. What an encoder made of
images is cached likewise: where prompts have images, ``reset_encoder_cache`` follows.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .private_names import check_private_names
from .ranks import WorkerRank
from .worker_hooks import constructing_worker, end_weight_update, guard_execution

if TYPE_CHECKING:
    from refit_transport.session.member import RefitMember

log = logging.getLogger("refit_transport")


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):
    """Where and as whom this engine joins a session. Plain data: over HTTP only JSON survives."""

    address: str
    """``ControlServer.address`` of the session."""
    rank_offset: int
    """Joint rank of this engine's first worker; the same on every data-parallel core of the engine."""
    engine: int = 0
    """Index of this replica, for messages."""
    timeout: float | None = None
    """Seconds until joining fails; the session's own when None."""
    domain: str | None = None
    """Fast-link domain of the workers; their host when None."""
    options: dict[str, Any] = field(default_factory=dict)
    """``serve_initial_weights`` (bool, default False): generate before the first refit of the session."""


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):
    """One refit."""

    version: int
    timeout: float | None = None
    """Seconds until the refit fails; the session's own when None."""


class ReshardEngine(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):
    """Registered as ``nccl_reshard`` and ``gather_broadcast``."""

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False
    """vLLM would update a draft model in a bracket of its own. Here it is part of each refit."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        check_private_names()
        super().__init__(config, vllm_config, device, model)
        self._member: RefitMember | None = None
        self._sink: Any = None
        self._refusal: str | None = None
        self._status: dict[str, Any] = {"state": "unjoined", "version": -1, "error": None, "report": None}
        self._worker = constructing_worker()
        if self._worker is not None:
            guard_execution(self._worker, lambda: self._refusal)
        if self.device.type == "cpu":
            self._mend_cpu_platform()

    # ---- vLLM's interface ------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Leave the session before, if any, and join the one at ``init_info.address``; blocks until every rank did."""
        self.shutdown()
        rank = init_info.rank_offset + self._rank.in_engine
        self._status.update(rank=rank, engine=init_info.engine, state="stale", version=-1, error=None, report=None)
        try:
            self._member = self._join(init_info, rank)
        except Exception as error:
            self._fail(f"engine {init_info.engine} could not join the refit session", error)
            return
        if not init_info.options.get("serve_initial_weights", False):
            self._refuse("it joined a refit session and has received no weights yet")

    def start_weight_update(self) -> None:
        """Nothing: the engine may compute until ``update_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The whole refit. The base class would call torch.accelerator, which not every worker has."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Raises RuntimeError on the last rank of the engine when the refit failed anywhere."""
        previous = self._status["version"]
        try:
            if self._member is None:
                raise RuntimeError("this engine is in no refit session; call init_weight_transfer_engine first")
            self._status["state"] = "updating"
            report = self._member.refit(update_info.version, timeout=update_info.timeout)
        except Exception as error:
            self._status["state"] = "stale"
            self._refuse(f"the refit from version {previous} to version {update_info.version} failed: {error}")
            self._fail(f"refit to version {update_info.version} failed", error)
            return
        self._refusal = None
        self._status.update(state="fresh", version=update_info.version, error=None, report=asdict(report))

    def finish_weight_update(self) -> None:
        """Nothing: ``update_weights`` committed."""

    def shutdown(self) -> None:
        """Leave the session. May be called at any time, also twice."""
        if self._member is not None:
            self._member.leave()
            self._member = None

    # ---- what the worker extension shows ---------------------------------------------------------------------------

    def refit_status(self) -> dict[str, Any]:
        """Plain data: ``pid``, ``host``, ``rank`` (joint), ``labels`` (coordinates in the engine), ``state`` (unjoined,
        stale, updating, fresh), ``version`` (-1: none of this session), ``error``, ``refusal`` (why the worker would
        raise instead of computing requests, or None), ``report`` of the last refit, ``modules`` by write mode,
        ``reasons`` of tensors that could not go directly."""
        modes = [] if self._sink is None else list(self._sink.modes().values())
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": None,
            "labels": self._rank.labels,
            **self._status,
            "refusal": self._refusal,
            "modules": {mode: modes.count(mode) for mode in sorted(set(modes))},
            "reasons": {} if self._sink is None else dict(self._sink.reasons),
        }

    # ---- parts -----------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> WorkerRank:
        return WorkerRank.of(self.parallel_config)

    def _join(self, info: ReshardInitInfo, rank: int) -> RefitMember:
        from refit_transport.session.member import RefitMember

        from .draft import worker_sink

        self._sink = worker_sink(self._worker, self.model, self.vllm_config, self.device)
        labels = {"engine": str(info.engine), **self._rank.labels}
        return RefitMember.join(
            info.address,
            rank=rank,
            role="engine",
            sink=self._sink,
            timeout=info.timeout,
            domain=info.domain,
            labels=labels,
        )

    def _refuse(self, why: str) -> None:
        self._refusal = (
            f"this engine (worker {self._rank.in_engine}) is STALE and must not generate: {why}. "
            "Complete a refit, or start the engine anew."
        )

    def _fail(self, what: str, error: Exception) -> None:
        """Note the failure on every rank; raise it on the last of this engine, where no reply is left behind."""
        self._status["error"] = f"{what}: {error}"
        log.error("%s", self._status["error"])
        parallel = self.parallel_config
        alone = parallel.distributed_executor_backend == "external_launcher"
        if alone or parallel.rank == parallel.world_size - 1:
            raise RuntimeError(self._status["error"]) from error
        if self._worker is not None:
            end_weight_update(self._worker)

    def _mend_cpu_platform(self) -> None:
        from . import cpu_fixups

        if self.parallel_config.enable_expert_parallel:
            cpu_fixups.map_expert_ids()
        if self.parallel_config.data_parallel_size > 1:
            cpu_fixups.exchange_tokens_of_experts()
        if self.parallel_config.pipeline_parallel_size > 1 and self._worker is not None:
            cpu_fixups.allocate_pipeline_buffers(self._worker.model_runner)
