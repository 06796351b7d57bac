"""Trainer layouts of the matrix: what each trainer rank holds, as real DTensors or by the rules of Megatron."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from refit_transport.layout.region import Region
from refit_transport.planning.presets import Training, describe_training
from refit_transport.trainers.base import WeightSource
from refit_transport.trainers.dtensor import DTensorSource
from refit_transport.trainers.tensors import TensorSource

from .policies import Policy, policy

Parallelize = Callable[[nn.Module, DeviceMesh], DeviceMesh]
"""Cuts a model over a mesh by everything but FSDP, and returns the mesh that FSDP then shards the rest over."""

_TENSOR_PARALLEL = {
    "self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel, "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}  # fmt: skip


def _fsdp_alone(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    return mesh


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    fsdp, tp = mesh.mesh_dim_names
    for layer in model.model.layers:
        plan = {path: style() for path, style in _TENSOR_PARALLEL.items() if _has(layer, path)}
        parallelize_module(layer, mesh[tp], plan, src_data_rank=None)
    return mesh[fsdp]


def _has(module: nn.Module, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return isinstance(getattr(module.get_submodule(parent), name, None), nn.Linear)


def _expert_parallel(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    """Whole experts over the second mesh dimension and FSDP over the first; everything else over both."""
    fsdp, ep = mesh.mesh_dim_names
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            cut = distribute_tensor(parameter.detach(), mesh[ep], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(cut))
        fully_shard(experts, mesh=mesh[fsdp])
    return mesh._flatten(f"{fsdp} and {ep}")


DTENSOR: dict[str, tuple[tuple[int, ...], Parallelize]] = {
    "FSDP 2": ((2,), _fsdp_alone),
    "FSDP 3 (uneven)": ((3,), _fsdp_alone),
    "HSDP 2 x 2": ((2, 2), _fsdp_alone),
    "FSDP 2 x TP 2": ((2, 2), _tensor_parallel),
    "FSDP 3 x TP 2 (uneven)": ((3, 2), _tensor_parallel),
    "FSDP 2 x EP 2": ((2, 2), _expert_parallel),
}
"""Real DTensors, read by ``DTensorSource``: mesh shape, and what is done before FSDP."""

MEGATRON: dict[str, Training] = {
    "Megatron TP 2": Training(tp=2),
    "Megatron TP 4": Training(tp=4),
    "Megatron PP 2": Training(pp=2),
    "Megatron PP 2 x VPP 2": Training(pp=2, vpp=2),
    "Megatron TP 2 x PP 2": Training(tp=2, pp=2),
    "Megatron TP 2 x DP 2": Training(tp=2, dp=2),
    "Megatron EP 4": Training(ep=4),
    "Megatron TP 2 x EP 4": Training(tp=2, ep=4),
    "Megatron EP 2 x ETP 2": Training(tp=2, ep=2, etp=2),
    "Megatron PP 2 x VPP 2 x EP 2": Training(pp=2, vpp=2, ep=2),
}
"""Plain tensors that hold what Megatron-core's ranks hold, by the layout rules of the planner's presets."""

NEEDS_EXPERTS = frozenset(name for name in (*DTENSOR, *MEGATRON) if " EP " in name)


@cache
def sources(layout: str, policy_name: str) -> tuple[WeightSource, ...]:
    """One weight source per trainer rank, all of them in this process."""
    made = policy(policy_name)
    if layout in MEGATRON:
        return tuple(_by_rules(made, MEGATRON[layout]))
    mesh_shape, _ = DTENSOR[layout]
    return tuple(_as_dtensors(made, layout, rank) for rank in range(prod(mesh_shape)))


def _as_dtensors(made: Policy, layout: str, rank: int) -> WeightSource:
    mesh_shape, parallelize = DTENSOR[layout]
    with _only_rank(rank, prod(mesh_shape)):
        model = copy.deepcopy(made.module)
        # Each rank has dimension names of its own: torch remembers meshes by value, and would hand out another rank's.
        names = tuple(f"{axis} of rank {rank}" for axis in ("outer", "inner")[-len(mesh_shape) :])
        rest = parallelize(model, init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
        for layer in model.model.layers:
            fully_shard(layer, mesh=rest)
        fully_shard(model, mesh=rest)
        return DTensorSource(model)


@contextmanager
def _only_rank(rank: int, world: int) -> Iterator[None]:
    """A process group whose collectives do nothing: cutting a full model on every rank alike needs none."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _by_rules(made: Policy, sizes: Training) -> Iterator[WeightSource]:
    side = describe_training(made.preset, sizes)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.checkpoint.items()}
    for rank in range(sizes.world):
        held = {entry.name: side.layout_of(entry).regions_of(rank) for entry in side.entries}
        yield TensorSource(
            shapes,
            {name: [(r, _strided(made.checkpoint[name], name, r)) for r in regions] for name, regions in held.items()},
        )


def _strided(full: torch.Tensor, name: str, region: Region) -> torch.Tensor:
    """A copy of the region as a trainer may store it: contiguous, inside a wider fused tensor, or transposed."""
    part = full[region.slices()]
    how = zlib.crc32(name.encode()) % 3
    if how == 0 or part.ndim < 2:
        return part.clone()
    if how == 1:
        return part.t().contiguous().t()
    wider = torch.full((part.shape[0] + 2, part.shape[1] + 3), float("nan"))
    view = wider[1:-1, 2:-1]
    return view.copy_(part)
