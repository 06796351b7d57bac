"""Refit through a shared folder: torch.distributed.checkpoint saves on the trainers and loads on the engines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo  # DTensor.from_local imports it: once before ranks are forked instead of in each of them
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.default_planner
import torch.distributed.checkpoint.filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from refit_transport.bench.holdings import Shards
from refit_transport.bench.workload import BenchTensor, Placement
from refit_transport.layout import placements as layout

from .base import RankContext


class Checkpoint:
    """The folder is a local disk here, which an emulated network does not slow: a lower bound of what users see."""

    def __init__(self, context: RankContext, name: str) -> None:
        self._context = context
        self._folder = context.folder / "checkpoint"

    def publish(self) -> dict[str, Any]:
        return {}

    def connect(self, published: Mapping[int, dict[str, Any]]) -> None:
        """One default group for all ranks, as torch.distributed.checkpoint expects it, and a group per side."""
        context = self._context
        os.environ["GLOO_SOCKET_IFNAME"] = context.interfaces.network
        world = context.config.world
        store = dist.FileStore(str(context.folder / "store-checkpoint"), len(world))
        dist.init_process_group("gloo", store=store, rank=world.index(context.rank), world_size=len(world))
        self._savers = dist.new_group([world.index(rank) for rank in context.config.trainers.ranks])
        self._loaders = dist.new_group([world.index(rank) for rank in context.config.engines.ranks])
        self._meshes: dict[Placement, DeviceMesh] = {}
        self._saved = self._state("trainers", context.source)
        self._loaded = self._state("engines", context.sink)

    def run(self, version: int) -> dict[str, Any]:
        path = self._folder / str(version)
        if self._context.rank in self._context.config.trainers.ranks:
            dcp.save(self._saved, checkpoint_id=path, process_group=self._savers)
        dist.barrier()
        if self._context.rank in self._context.config.engines.ranks:
            dcp.load(self._loaded, checkpoint_id=path, process_group=self._loaders)
        return {}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _state(self, side: str, shards: Shards) -> dict[str, torch.Tensor]:
        """Shards as DTensors that share their storage; a tensor that one rank holds whole goes in as it is."""
        return {
            tensor.logical.name: self._as_dtensor(tensor, getattr(tensor, side), shards.tensors[tensor.logical.name])
            for tensor in self._context.tensors
            if tensor.logical.name in shards.tensors
        }

    def _as_dtensor(self, tensor: BenchTensor, placement: Placement, local: torch.Tensor) -> torch.Tensor:
        if tuple(local.shape) == tensor.logical.shape:
            return local
        if placement not in self._meshes:
            ranks = torch.tensor([self._context.config.world.index(rank) for rank in placement.mesh.ranks])
            self._meshes[placement] = DeviceMesh("cpu", ranks.view(placement.mesh.shape), _init_backend=False)
        placements = [Shard(p.dim) if isinstance(p, layout.Shard) else Replicate() for p in placement.placements]
        stride = torch.empty(tensor.logical.shape, device="meta").stride()
        shape = torch.Size(tensor.logical.shape)
        return DTensor.from_local(
            local, self._meshes[placement], placements, run_check=False, shape=shape, stride=stride
        )
