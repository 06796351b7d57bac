"""The directory of the policy's initial model; built-in tiny models are made when they are first asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refit_transport.config.tiny_models import TINY_MODELS

log = logging.getLogger("refit_transport")


def local_model(policy: Mapping[str, Any], cache: Path) -> Path:
    """``policy.model_name`` as a directory; tiny models are kept under ``cache``. Raises ValueError for a missing
    path."""
    name, tiny = policy["model_name"], policy["tiny_model"]
    if name in TINY_MODELS:
        from refit_transport.rl.tasks.tiny_model import make_tiny_model

        seed, steps = tiny["seed"], tiny["warm_start_steps"]
        folder = f"{name.replace('/', '-')}-seed{seed}-warm{steps}"
        log.info("model %s (%d warm-up steps) in %s", name, steps, cache / "models" / folder)
        return make_tiny_model(cache.resolve() / "models" / folder, seed, steps, moe="num_experts" in TINY_MODELS[name])
    if not Path(name).is_dir():
        raise ValueError(
            f"policy.model_name: found {name!r}, which is no directory; allowed: {sorted(TINY_MODELS)} or a path"
        )
    return Path(name).resolve()
