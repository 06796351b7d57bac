"""Ranks as forked processes over plain tensors: a small refit world for the session's tests."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.region import Region
from refit_transport.session.control_server import ControlServer
from refit_transport.session.member import RefitMember
from refit_transport.trainers.tensors import TensorSource

SHAPES = {
    "model.embed_tokens.weight": (7, 10),
    "model.layers.0.mlp.gate_proj.weight": (24, 10),
    "model.layers.0.mlp.up_proj.weight": (24, 10),
    "model.layers.0.mlp.down_proj.weight": (10, 24),
    "model.layers.0.self_attn.q_proj.weight": (9, 10),
    "model.norm.weight": (10,),
}


def values(name: str, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """Distinct float32 values of a parameter at a version: no two elements, names or versions share them."""
    seed = sorted(SHAPES).index(name) * 1000 + version
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) + seed * 4096).view(shape)


def shard(size: int, parts: int, index: int) -> tuple[int, int]:
    step = -(-size // parts)
    return min(size, index * step), min(size, (index + 1) * step)


@dataclass
class World:
    """``trainers`` hold rows, ``engines`` hold columns (rows of 1-D tensors); every engine pair is one replica."""

    trainers: int
    engines: int
    options: dict[str, Any] = field(default_factory=lambda: {"transport": "nccl_reshard", "scope": "all"})

    @property
    def size(self) -> int:
        return self.trainers + self.engines

    def held_by_trainer(self, rank: int, version: int) -> dict[str, list[tuple[Region, torch.Tensor]]]:
        held = {}
        for name, shape in SHAPES.items():
            a, b = shard(shape[0], self.trainers, rank)
            region = Region((a,) + (0,) * (len(shape) - 1), (b, *shape[1:]))
            held[name] = [] if region.empty else [(region, values(name, shape, version)[a:b].clone())]
        return held

    def held_by_engine(self, rank: int) -> dict[str, list[tuple[Region, torch.Tensor]]]:
        held = {}
        for name, shape in SHAPES.items():
            a, b = shard(shape[-1], 2, (rank - self.trainers) % 2)
            region = Region((0,) * (len(shape) - 1) + (a,), (*shape[:-1], b))
            held[name] = [(region, torch.full(region.shape, -1.0))]
        return held


class TrainerRank:
    def __init__(self, world: World, rank: int, address: str, **join: Any) -> None:
        self.held = world.held_by_trainer(rank, 0)
        self.member = RefitMember.join(
            address, rank=rank, role="trainer", source=TensorSource(SHAPES, self.held), **join
        )

    def load(self, version: int) -> None:
        for name, parts in self.held.items():
            for region, tensor in parts:
                tensor.copy_(values(name, SHAPES[name], version)[region.slices()])


class EngineRank:
    def __init__(self, world: World, rank: int, address: str, **join: Any) -> None:
        self.held = world.held_by_engine(rank)
        self.member = RefitMember.join(address, rank=rank, role="engine", sink=TensorSink(self.held), **join)

    def wrong(self, version: int) -> list[str]:
        """Names whose stored part differs from the oracle."""
        return [
            name
            for name, parts in self.held.items()
            for region, tensor in parts
            if not torch.equal(tensor, values(name, SHAPES[name], version)[region.slices()])
        ]


def run_ranks(world: World, body: Callable[[World, int, str], Any], stopped: int | None = None) -> list[Any]:
    """``body(world, rank, address)`` in a forked process per rank; what each returned, or the exception it raised. Rank
    ``stopped`` is killed once all others have ended."""
    server = ControlServer(world.size, world.options)
    children = [_fork(world, rank, server.address, body) for rank in range(world.size)]
    try:
        results = {rank: _result(*child) for rank, child in enumerate(children) if rank != stopped}
        if stopped is not None:
            os.kill(children[stopped][0], signal.SIGKILL)
            results[stopped] = _result(*children[stopped])
        return [results[rank] for rank in range(world.size)]
    finally:
        server.close()


def _fork(world: World, rank: int, address: str, body: Callable) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    torch.set_num_threads(1)
    try:
        outcome = body(world, rank, address)
    except BaseException as error:
        outcome = error
        if not str(error):
            traceback.print_exc()
    with os.fdopen(writer, "wb") as pipe:
        try:
            pipe.write(pickle.dumps(outcome))
        except Exception:
            pipe.write(pickle.dumps(RuntimeError(f"{type(outcome).__name__}: {outcome}")))
    os._exit(0)


def _result(pid: int, reader: int) -> Any:
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data) if data else None
