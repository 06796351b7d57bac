"""How a model is cut over the ranks: sizes of the mesh, and FSDP2 or HSDP layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How the world is cut. Ranks are numbered dp_replicate first, then dp_shard, then tp."""

    dp_replicate: int
    dp_shard: int
    tp: int
    ep: int

    @classmethod
    def of(cls, dtensor_cfg: Mapping[str, Any], world_size: int) -> ParallelSizes:
        """Raises ValueError with every violation, one a line."""
        replicate, tp, ep = (
            int(dtensor_cfg.get(key) or 1)
            for key in ("dp_replicate_size", "tensor_parallel_size", "expert_parallel_size")
        )
        found = []
        if world_size % (replicate * tp):
            found.append(
                f"policy.dtensor_cfg: tensor_parallel_size {tp} x dp_replicate_size {replicate} must divide the "
                f"number of trainer ranks, got {world_size}"
            )
        elif ep > 1 and (ep % tp or world_size // replicate % ep):
            found.append(
                f"policy.dtensor_cfg.expert_parallel_size: got {ep}, allowed 1, or a multiple of tensor_parallel_size "
                f"{tp} that divides the {world_size // replicate} ranks of a replica"
            )
        if found:
            raise ValueError("\n".join(found))
        return cls(replicate, world_size // (replicate * tp), tp, ep)

    @property
    def dp(self) -> int:
        """Ranks that see different rows."""
        return self.dp_replicate * self.dp_shard


class FsdpPolicies(TypedDict):
    """Keyword arguments of ``fully_shard``."""

    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def fsdp_policies(config: Mapping[str, Any]) -> FsdpPolicies:
    """From ``precision`` and ``dtensor_cfg.cpu_offload`` of a ``policy.*`` sub-tree."""
    offload = CPUOffloadPolicy() if (config.get("dtensor_cfg") or {}).get("cpu_offload") else OffloadPolicy()
    dtype = DTYPES[config.get("precision") or "float32"]
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    return {"mp_policy": mixed or MixedPrecisionPolicy(), "offload_policy": offload}


def shard_layers(model: torch.nn.Module, mesh: DeviceMesh, config: Mapping[str, Any]) -> None:
    """FSDP2 on every decoder layer and on the rest of the model, over a mesh of one dimension, or two (HSDP)."""
    policies = fsdp_policies(config)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that the model's authors declare as indivisible; raises ValueError when it declares none."""
    names = {name for m in model.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} declares no _no_split_modules, so its layers are unknown")
    return layers


def local_shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's shard of every trained parameter, live, without gradients."""
    if isinstance(model, FSDPModule):
        model.reshard()  # a forward pass without backward leaves the root's parameters gathered
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return [p.to_local() if isinstance(p, DTensor) else p for p in trained]
