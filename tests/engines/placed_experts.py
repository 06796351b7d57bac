"""vLLM models whose experts are spread over ranks, without an engine: each rank builds its part in a gloo process.

``python -m tests.engines.placed_experts CASES RESULTS`` runs cases from one JSON file and writes what their ranks found
to another. It imports vLLM once and forks the ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

EXPERT = re.compile(r"\.experts\.(\d+)\.")
DEADLINE_S = 120
PRELOADED = ("vllm.model_executor.model_loader", "vllm.engine.arg_utils", "refit_transport.engines.vllm.sink")
"""What no forked rank should pay for."""


def main(cases: Path, results: Path) -> None:
    """Run every case, whatever became of those before it."""
    import torch

    for module in PRELOADED:
        import_module(module)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    found = {name: _run(case) for name, case in json.loads(cases.read_text()).items()}
    results.write_text(json.dumps(found))


def _run(case: dict[str, Any]) -> list[Any]:
    """Per rank: what ``_rank`` returns, or the text of what went wrong."""
    from refit_transport.cluster.data_parallel import free_port

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, port = [], free_port()
        for rank in range(case["data"] * case["tensor"]):
            here, there = context.Pipe()
            context.Process(target=_answer, args=(there, rank, case, folder, port), daemon=True).start()
            there.close()
            pipes.append(here)
        return [pipe.recv() if pipe.poll(DEADLINE_S) else "no answer" for pipe in pipes]


def _answer(pipe: Any, rank: int, case: dict[str, Any], folder: str, port: int) -> None:
    signal.alarm(DEADLINE_S)
    try:
        pipe.send(_rank(rank, case, folder, port))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


def _rank(rank: int, case: dict[str, Any], folder: str, port: int) -> dict[str, Any]:
    """Load A, bring B, compare with what loads B: experts it holds, tensors that differ, those that differed before."""
    import torch

    from refit_transport.engines.vllm.fingerprint import fingerprint
    from refit_transport.engines.vllm.ranks import WorkerRank
    from refit_transport.engines.vllm.sink import VllmSink
    from tests.engines.vllm_engines import LocalRefit
    from tests.models import read_checkpoint

    torch.set_num_threads(1)
    data_rank, tensor_rank = divmod(rank, case["tensor"])
    _join(data_rank, case["data"], folder, port)
    config, model = _load(case, case["paths"]["a"], tensor_rank, folder)
    _, fresh = _load(case, case["paths"]["b"], tensor_rank, folder)
    wanted, before = fingerprint(fresh), fingerprint(model)
    refit = LocalRefit(VllmSink(model, config, torch.device("cpu")), read_checkpoint(case["paths"]["b"]))
    refit.bring(read_checkpoint(case["paths"]["b"]))
    now = fingerprint(model)
    place = WorkerRank.of(config.parallel_config)
    return {
        "experts": sorted({expert for item in refit.description.direct.items() for expert in _experts_of(*item)}),
        "whole": sorted(name for name in refit.description.whole if ".experts." in name and "bias" not in name),
        "wrong": sorted(path for path in wanted if wanted[path] != now.get(path)),
        "unchanged_experts": sorted(p for p in wanted if wanted[p] == before[p] and "experts.w" in p),
        "place": [place.data, place.pipeline, place.tensor, place.in_engine],
    }


def _experts_of(name: str, regions: Any) -> set[int]:
    """Experts of a checkpoint tensor that go straight to the rank: one by name, or rows of all in one tensor."""
    if found := EXPERT.search(name):
        return {int(found[1])}
    fused = regions if name.endswith(".experts.down_proj") else ()
    return {expert for region in fused for expert in range(region.start[0], region.stop[0])}


def _join(data_rank: int, data: int, folder: str, port: int) -> None:
    """Environment of the rank. The ranks of all data-parallel cores form one group."""
    from refit_transport.cluster.data_parallel import core_env

    os.environ["VLLM_DIST_IDENT"] = f"{Path(folder).name}-{data_rank}"
    if data > 1:
        os.environ.update(core_env(data_rank, data, "127.0.0.1", port))


def _load(case: dict[str, Any], path: str, tensor_rank: int, folder: str) -> tuple[Any, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        path, dtype="bfloat16", enforce_eager=True, max_model_len=128, tensor_parallel_size=case["tensor"],
        distributed_executor_backend="mp", enable_expert_parallel=True, expert_placement_strategy=case["placement"],
    ).create_engine_config()  # fmt: skip
    config.parallel_config.rank = tensor_rank
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(
                case["tensor"], tensor_rank, f"file://{folder}/store", tensor_rank, "gloo"
            )
            parallel_state.initialize_model_parallel(case["tensor"])
        return config, get_model(vllm_config=config)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
