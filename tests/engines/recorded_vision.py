"""Qwen2.5-VL as vLLM builds it, without an engine: ``python -m tests.engines.recorded_vision A B RESULTS`` loads both
checkpoints, brings B and then A to the model of A, and writes what it found.

vLLM's module imports torchvision, which the CPU environment leaves out. ``write_stand_in`` makes a package that can be
imported and does nothing: it would prepare images, and no weight depends on it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

STAND_IN = {
    "__init__.py": '__version__ = "0.27.0"',
    "io/__init__.py": "ImageReadMode = decode_image = None",
    "transforms/__init__.py": "import enum\nInterpolationMode = enum.Enum('InterpolationMode', '{modes}')",
    "transforms/functional.py": "pil_to_tensor = None",
    "transforms/v2/__init__.py": "",
    "transforms/v2/functional.py": "pil_to_tensor = None",
}
MODES = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"


def write_stand_in(folder: Path) -> None:
    """A package ``torchvision`` in ``folder``, for ``PYTHONPATH``."""
    for name, text in STAND_IN.items():
        file = folder / "torchvision" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(modes=MODES))


def main(paths: list[str], results: Path) -> None:
    import torch

    from refit_transport.engines.vllm.fingerprint import fingerprint
    from refit_transport.engines.vllm.sink import VllmSink
    from tests.engines.vllm_engines import LocalRefit
    from tests.models import read_checkpoint

    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    with tempfile.TemporaryDirectory() as folder:
        (config, model), (_, other) = (_load(path, folder) for path in paths)
    fresh = [fingerprint(each) for each in (model, other)]
    checkpoints = [read_checkpoint(path) for path in paths]
    refit = LocalRefit(VllmSink(model, config, torch.device("cpu")), checkpoints[0])
    wrong = []
    for which in (1, 0):
        refit.bring(checkpoints[which])
        now = fingerprint(model)
        wrong += [path for path in fresh[which] if now.get(path) != fresh[which][path]]
    found = {
        "model": type(model).__module__,
        "direct": sorted(refit.description.direct),
        "sent": sorted(checkpoints[0]),
        "changed": sorted(path for path in fresh[0] if fresh[0][path] != fresh[1][path]),
        "wrong": wrong,
    }
    results.write_text(json.dumps(found))


def _load(path: str, folder: str) -> tuple[Any, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(path, dtype="bfloat16", enforce_eager=True, max_model_len=128).create_engine_config()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.initialize_model_parallel(1)
        return config, get_model(vllm_config=config)


if __name__ == "__main__":
    main(sys.argv[1:3], Path(sys.argv[3]))
