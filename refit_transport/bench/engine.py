"""Refits into a real vLLM engine: how long it is quiet, and what of that is transfer, loading and cache reset."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from refit_transport.layout.region import Region
from refit_transport.session.control_server import ControlServer
from refit_transport.trainers.tensors import TensorSource


@dataclass(frozen=True, slots=True)
class EngineCase:
    """``model``: a Hugging Face checkpoint directory with safetensors. One trainer rank holds all of it."""

    model: Path
    transport: str = "nccl_reshard"
    scope: str = "ffn"
    tensor_parallel: int = 1
    rounds: int = 5
    timeout_seconds: float = 120.0
    engine_options: dict[str, Any] = field(default_factory=dict)


class _Client:
    """vLLM's client protocol over an engine in this process, with the time of every call."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.seconds: dict[str, float] = {}

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": info})

    def start_weight_update(self) -> None:
        self._timed("pause", self._llm.start_weight_update)

    def update_weights(self, info: dict[str, Any]) -> None:
        self._timed("update", lambda: self._llm.update_weights({"update_info": info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._timed("finish", lambda: self._llm.finish_weight_update(weight_version))

    def reset_prefix_cache(self) -> None:
        self._timed("resume", self._llm.reset_prefix_cache)

    def _timed(self, name: str, call: Any) -> None:
        started = time.monotonic()
        call()
        self.seconds[name] = time.monotonic() - started


def measure_engine(case: EngineCase) -> dict[str, Any]:
    """Start the engine, refit it ``rounds`` times after an untimed first one, and return medians by phase in seconds.

    ``update`` holds the transfer and the loading; ``transfer`` and ``load`` are what the session reports of them."""
    from vllm import LLM
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from refit_transport.engines.vllm.plugin import register
    from refit_transport.engines.vllm.trainer_engine import ReshardTrainerInitInfo

    register()
    llm = LLM(
        model=str(case.model),
        tensor_parallel_size=case.tensor_parallel,
        weight_transfer_config={"backend": case.transport},
        worker_extension_cls="refit_transport.engines.vllm.extension.RefitExtension",
        **case.engine_options,
    )
    options = {"transport": case.transport, "scope": case.scope, "timeout_s": case.timeout_seconds}
    server = ControlServer(1 + case.tensor_parallel, options)
    client = _Client(llm)
    info = ReshardTrainerInitInfo(rank=0, address=server.address, trainers=1, engine_ranks=(case.tensor_parallel,))
    try:
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=_source(case.model))
        refits = [_one_refit(trainer, client) for _ in range(case.rounds + 1)][1:]
        trainer.shutdown()
    finally:
        server.close()
    return {
        "model": str(case.model),
        "transport": case.transport,
        "scope": case.scope,
        "tensor_parallel": case.tensor_parallel,
        "rounds": case.rounds,
        "seconds_median": {key: median(refit[key] for refit in refits) for key in refits[0]},
        "refits": refits,
    }


def _one_refit(trainer: Any, client: _Client) -> dict[str, float]:
    started = time.monotonic()
    report = trainer.send_weights()
    total = time.monotonic() - started
    phases = {name: report.phases.get(name, 0.0) for name in ("transfer", "load", "commit")}
    return {"total": total, **client.seconds, **phases, "bytes": report.bytes_reshard + report.bytes_broadcast}


def _source(model: Path) -> TensorSource:
    from safetensors.torch import load_file

    tensors = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TensorSource(shapes, {name: [(Region.whole(shapes[name]), tensor)] for name, tensor in tensors.items()})
