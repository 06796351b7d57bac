"""Refits into a real vLLM engine that has requests in flight: how long it is quiet, and with what."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from refit_transport.cluster.placement import CPU_WORKER_ENV
from refit_transport.session.control_server import ControlServer
from refit_transport.session.report import RefitReport

from .engine_requests import Requests
from .engine_trainers import CheckpointTrainer
from .processes import Ranks

ENVIRONMENT = CPU_WORKER_ENV | {"VLLM_LOGGING_LEVEL": "ERROR"}
"""Unless the user set another value. All processes are on this host."""


@dataclass(frozen=True, slots=True)
class EngineCase:
    """``model``: a Hugging Face checkpoint directory with safetensors, whose rows the trainer ranks share."""

    model: Path
    transport: str = "nccl_reshard"
    scope: str = "ffn"
    trainers: int = 2
    tensor_parallel: int = 1
    requests: int = 4
    """How many requests are always in flight."""
    pause: str = "keep"
    """What becomes of requests in flight: ``keep``, ``wait`` or ``abort``, as in ``AsyncLLM.pause_generation``."""
    rounds: int = 5
    timeout_seconds: float = 120.0
    engine_options: dict[str, Any] = field(default_factory=dict)


def measure_engine(case: EngineCase) -> dict[str, Any]:
    """Start trainers and the engine, refit it ``rounds`` times after an untimed first one, and return medians by phase
    in seconds.

    ``quiet`` is the time from asking for the pause until the engine runs again: ``pause``, ``update``, ``finish``,
    ``reset`` (of the prefix cache, requests in flight included) and ``resume``. ``update`` holds ``transfer``, ``load``
    and ``commit`` as the session reports them. Raises what a rank or the engine raises, and TimeoutError that names the
    step that took more than ``timeout_seconds``.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    with Ranks(
        range(case.trainers), partial(CheckpointTrainer, case.model, case.trainers, case.timeout_seconds)
    ) as trainers:
        refits = asyncio.run(_measure(case, trainers))
    return {
        "model": str(case.model),
        "transport": case.transport,
        "scope": case.scope,
        "trainers": case.trainers,
        "tensor_parallel": case.tensor_parallel,
        "requests": case.requests,
        "pause": case.pause,
        "rounds": case.rounds,
        "seconds_median": {key: median(refit[key] for refit in refits) for key in refits[0] if key != "bytes"},
        "bytes": refits[-1]["bytes"],
        "refits": refits,
    }


async def _measure(case: EngineCase, trainers: Ranks) -> list[dict[str, float]]:
    from vllm import AsyncEngineArgs
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from refit_transport.engines.vllm.plugin import register

    register()
    arguments = AsyncEngineArgs(
        model=str(case.model),
        tensor_parallel_size=case.tensor_parallel,
        weight_transfer_config={"backend": case.transport},
        worker_extension_cls="refit_transport.engines.vllm.extension.RefitExtension",
        **case.engine_options,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    options = {"transport": case.transport, "scope": case.scope, "timeout_s": case.timeout_seconds}
    server = ControlServer(case.trainers + case.tensor_parallel, options)
    try:
        request = WeightTransferInitRequest(init_info={"address": server.address, "rank_offset": case.trainers})
        await _beside(
            engine.init_weight_transfer_engine(request),
            lambda: trainers.call("join", server.address, seconds=case.timeout_seconds),
        )
        await _refit(case, engine, trainers, 0)
        tokens = max(8, case.engine_options.get("max_model_len", 256) // 2)
        async with Requests(engine, case.requests, tokens, case.timeout_seconds) as requests:
            refits = []
            for version in range(1, case.rounds + 1):
                refits.append(await _refit(case, engine, trainers, version))
                await requests.progress()
        trainers.call("close")
        return refits
    finally:
        with suppress(Exception):
            engine.shutdown()
        server.close()


async def _refit(case: EngineCase, engine: Any, trainers: Ranks, version: int) -> dict[str, float]:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    update = WeightTransferUpdateRequest(update_info={"version": version, "timeout": case.timeout_seconds})
    seconds: dict[str, float] = {}
    reports: dict[int, RefitReport] = {}

    async def exchange() -> None:
        await engine.start_weight_update()
        reports.update(
            await _beside(
                engine.update_weights(update),
                lambda: trainers.call("refit", version, seconds=case.timeout_seconds),
            )
        )

    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "pause": lambda: engine.pause_generation(mode=case.pause, clear_cache=False),
        "update": exchange,
        "finish": lambda: engine.finish_weight_update(str(version)),
        "reset": lambda: engine.reset_prefix_cache(reset_running_requests=True),
        "resume": engine.resume_generation,
    }
    started = time.monotonic()
    for name, step in steps.items():
        before = time.monotonic()
        try:
            await asyncio.wait_for(step(), case.timeout_seconds)
        except TimeoutError as error:
            raise TimeoutError(f"refit {version}: {name} took more than {case.timeout_seconds:g} s") from error
        seconds[name] = time.monotonic() - before
    quiet = time.monotonic() - started
    report = reports[0]
    phases = {name: report.phases.get(name, 0.0) for name in ("transfer", "load", "commit")}
    return {"quiet": quiet, **seconds, **phases, "bytes": report.bytes_reshard + report.bytes_broadcast}


async def _beside(call: Awaitable[Any], blocking: Callable[[], Any]) -> Any:
    """Result of ``blocking``, run in a thread while ``call`` is awaited."""
    _, result = await asyncio.gather(call, asyncio.to_thread(blocking))
    return result
