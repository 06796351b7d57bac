"""Tensor and expert parallelism by the plans that transformers keeps with its models, over meshes that leave room for
replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from refit_transport.rl.policy.parallel import FsdpPolicies, ParallelSizes

_DISPATCH = "ep_dispatch_experts"
"""transformers' name of the plan that sends tokens to the ranks of their experts."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """The same ranks twice: as dense tensors see them, and as experts do."""

    dense: DeviceMesh
    """dp_replicate x dp_shard x tp."""
    expert: DeviceMesh
    """dp_replicate x efsdp x ep, where efsdp * ep = dp_shard * tp."""

    @classmethod
    def of(cls, sizes: ParallelSizes, device: torch.device) -> Meshes:
        """Every rank calls it."""
        experts = sizes.dp_shard * sizes.tp // sizes.ep
        return cls(
            init_device_mesh(
                device.type,
                (sizes.dp_replicate, sizes.dp_shard, sizes.tp),
                mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
            ),
            init_device_mesh(
                device.type, (sizes.dp_replicate, experts, sizes.ep), mesh_dim_names=("dp_replicate", "efsdp", "ep")
            ),
        )

    def fsdp(self) -> DeviceMesh:
        """What FSDP cuts dense tensors over: one dimension, or two (HSDP)."""
        return _with_replicas(self.dense, "dp_shard")

    def expert_fsdp(self) -> DeviceMesh:
        """What FSDP cuts the tensors of dispatched experts over."""
        return _with_replicas(self.expert, "efsdp")


def cut_tensors(model: nn.Module, sizes: ParallelSizes, meshes: Meshes) -> None:
    """Makes DTensors of the parameters of a transformers model, and gives its modules the forward passes that go with
    them. Raises ValueError for a model that has no plan, or one that does not fit the sizes."""
    if sizes.tp == sizes.ep == 1:
        return
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import (
        apply_expert_parallelism,
        apply_tensor_parallelism,
        resolve_parallel_plans,
    )

    config = DistributedConfig(tp_size=sizes.tp, fsdp_size=sizes.dp, ep_size=sizes.ep)
    tensor_plan, expert_plan = resolve_parallel_plans(model, config)
    if sizes.tp > 1 and not tensor_plan:
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size: got {sizes.tp}, allowed 1: transformers has no tensor-parallel "
            f"plan for {type(model).__name__}"
        )
    dispatched = _DISPATCH in expert_plan.values()
    if expert_plan and not dispatched and sizes.ep != sizes.tp:
        raise ValueError(
            f"policy.dtensor_cfg.expert_parallel_size: got {sizes.ep}, allowed tensor_parallel_size ({sizes.tp}): "
            f"the experts of {type(model).__name__} take the tokens of their tensor-parallel group"
        )
    tp = meshes.dense["tp"]
    if tensor_plan:
        apply_tensor_parallelism(model, tp, tensor_plan)
    if dispatched:
        apply_expert_parallelism(model, meshes.expert["ep"], tp, expert_plan)
    elif expert_plan:
        apply_tensor_parallelism(model, tp, expert_plan)
    model.tie_weights()


def shard_dispatched_experts(model: nn.Module, sizes: ParallelSizes, meshes: Meshes, policies: FsdpPolicies) -> None:
    """FSDP2 on the modules whose experts are spread over ranks that see different tokens. To be called before FSDP
    takes the layers around them."""
    mesh = meshes.expert_fsdp()
    shared = mesh.size(-1) > 1  # else torch divides by itself, and would divide once more
    for module in model.modules():
        if any(_is_expert(parameter) for parameter in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh, **policies)
            # An expert's gradient has the tokens of all data-parallel ranks, however few of them share its memory.
            module.set_gradient_divide_factor(float(sizes.dp))
            if shared and dist.get_backend(mesh.get_group(0)) != "nccl":
                module.set_force_sum_reduction_for_comms(True)  # other backends cannot divide on the way


def _is_expert(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _with_replicas(mesh: DeviceMesh, dimension: str) -> DeviceMesh:
    return mesh["dp_replicate", dimension] if mesh["dp_replicate"].size() > 1 else mesh[dimension]
