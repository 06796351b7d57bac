"""Sharded checkpoints of a worker: model, optimizer, schedule and random state, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LRScheduler

EXTRA_FILE = "extra.json"


def save(
    path: str | os.PathLike,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    extra: dict[str, Any],
) -> None:
    """Every rank calls it. The directory ``path`` appears only when all of it is on disk, and replaces an older one.
    ``extra`` is kept as JSON."""
    final, partial = Path(path), Path(f"{path}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    torch.save(_local_state(scheduler), partial / _local_file(dist.get_rank()))
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / EXTRA_FILE).write_text(json.dumps(extra))
        replace_directory(partial, final)
    dist.barrier()


def load(
    path: str | os.PathLike,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
) -> dict[str, Any]:
    """Restores what ``save`` wrote and returns ``extra``. The number of ranks may differ; then random states of ranks
    that were not there stay as they are. Raises FileNotFoundError when there is no complete checkpoint at ``path``."""
    path = _complete(Path(path))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    own = path / _local_file(dist.get_rank())
    local = torch.load(own if own.exists() else path / _local_file(0), weights_only=True)
    if scheduler is not None and local["scheduler"] is not None:
        scheduler.load_state_dict(local["scheduler"])
    if own.exists():
        torch.set_rng_state(local["rng"])
        if torch.cuda.is_available() and local["cuda_rng"] is not None:
            torch.cuda.set_rng_state(local["cuda_rng"])
    dist.barrier()
    return json.loads((path / EXTRA_FILE).read_text())


def _complete(path: Path) -> Path:
    """``path``, or the older checkpoint that stepped aside if the process died before the new one took its place."""
    for candidate in (path, Path(f"{path}.old")):
        if (candidate / EXTRA_FILE).exists():
            return candidate
    raise FileNotFoundError(f"no complete checkpoint at {path} ({EXTRA_FILE} is missing)")


def _local_state(scheduler: LRScheduler | None) -> dict[str, Any]:
    return {
        "scheduler": scheduler.state_dict() if scheduler else None,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _local_file(rank: int) -> str:
    return f"rank{rank}.pt"


def replace_directory(partial: Path, final: Path) -> None:
    """Puts ``partial`` in the place of ``final``. Directories cannot be exchanged in one step, so an older one steps
    aside first."""
    old = Path(f"{final}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
