"""Checkpoints of a Megatron worker: one file per rank, written whole or not at all, read by the same layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from refit_transport.rl.policy.checkpoint import EXTRA_FILE, replace_directory
from refit_transport.rl.policy.megatron_optimizer import LearningRate


def save(
    path: str | os.PathLike,
    chunks: Sequence[nn.Module],
    optimizer: Any,
    rate: LearningRate,
    layout: Mapping[str, int],
    extra: dict[str, Any],
) -> None:
    """Every rank calls it. ``layout`` says how the model is cut, and is compared when the checkpoint is read."""
    final, partial = Path(path), Path(f"{path}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = {
        "layout": dict(layout),
        "model": [_tensors(chunk) for chunk in chunks],
        "optimizer": [_optimizer_state(part) for part in _parts(optimizer)],
        "rate": rate.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    torch.save(state, partial / _file(dist.get_rank()))
    dist.barrier()
    if dist.get_rank() == 0:
        (partial / EXTRA_FILE).write_text(json.dumps(extra))
        replace_directory(partial, final)
    dist.barrier()


@torch.no_grad()
def load(
    path: str | os.PathLike,
    chunks: Sequence[nn.Module],
    optimizer: Any,
    rate: LearningRate,
    layout: Mapping[str, int],
) -> dict[str, Any]:
    """Restores what ``save`` wrote and returns ``extra``. Raises FileNotFoundError when there is no complete checkpoint
    at ``path``, and ValueError when it was written by another layout."""
    path = Path(path)
    if not (path / EXTRA_FILE).exists():
        raise FileNotFoundError(f"no complete checkpoint at {path} ({EXTRA_FILE} is missing)")
    written = torch.load(path / _file(0), weights_only=False, mmap=True)["layout"]
    if written != dict(layout):
        raise ValueError(f"{path}: written with {written}, and this run has {dict(layout)}; allowed is the same layout")
    state = torch.load(path / _file(dist.get_rank()), weights_only=False)
    for chunk, saved in zip(chunks, state["model"], strict=True):
        for name, tensor in _tensors(chunk).items():
            tensor.copy_(saved[name])
    for part, saved in zip(_parts(optimizer), state["optimizer"], strict=True):
        _restore_optimizer(part, saved)
    rate.load_state_dict(state["rate"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"])
    dist.barrier()
    return json.loads((path / EXTRA_FILE).read_text())


def _tensors(chunk: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, live; derived buffers cost little and need no exception."""
    return {name: t.detach() for name, t in (*chunk.named_parameters(), *chunk.named_buffers())}


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain (dense and expert parameters have one each)."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _master_weights(part: Any) -> list[torch.Tensor]:
    """What the inner optimizer updates: this rank's float32 copies, or its shard of them."""
    return [p.detach() for group in part.optimizer.param_groups for p in group["params"]]


def _optimizer_state(part: Any) -> dict[str, Any]:
    if part.optimizer is None:
        return {}
    return {"inner": part.optimizer.state_dict(), "weights": _master_weights(part)}


def _restore_optimizer(part: Any, saved: Mapping[str, Any]) -> None:
    if part.optimizer is None:
        return
    for weight, value in zip(_master_weights(part), saved["weights"], strict=True):
        weight.copy_(value)
    part.optimizer.load_state_dict(saved["inner"])


def _file(rank: int) -> str:
    return f"megatron_rank{rank}.pt"
