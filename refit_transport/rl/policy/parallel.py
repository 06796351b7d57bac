"""How a model is cut over the ranks: sizes of the mesh, and FSDP2 or HSDP layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        if ep not in (1, tp):
            found.append(
                f"policy.dtensor_cfg.expert_parallel_size: got {ep}, allowed 1 or tensor_parallel_size ({tp}): the "
                "ranks of an expert group see the same tokens"
            )
        if replicate > 1 and tp > 1:
            found.append(
                f"policy.dtensor_cfg.dp_replicate_size: got {replicate} with tensor_parallel_size {tp}, allowed 1; "
                "set one of them to 1"
            )
        if found:
            raise ValueError("\n".join(found))
        return cls(replicate, world_size // (replicate * tp), tp, ep)

    @property
    def dp(self) -> int:
        """Ranks that see different rows."""
        return self.dp_replicate * self.dp_shard


def shard_layers(model: torch.nn.Module, mesh: DeviceMesh, config: Mapping[str, Any]) -> None:
    """FSDP2 on every decoder layer and on the rest of the model, over a mesh of one dimension, or two (HSDP)."""
    offload = CPUOffloadPolicy() if (config.get("dtensor_cfg") or {}).get("cpu_offload") else OffloadPolicy()
    dtype = DTYPES[config.get("precision") or "float32"]
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    policies = {"mesh": mesh, "mp_policy": mixed or MixedPrecisionPolicy(), "offload_policy": offload}
    for layer in decoder_layers(model):
        fully_shard(layer, **policies)
    fully_shard(model, **policies)


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


@contextmanager
def fresh_plain_gradients(model: torch.nn.Module) -> Iterator[None]:
    """A backward pass inside starts without gradients on plain parameters, and earlier ones are added afterwards.

    transformers sums the gradients of some replicated parameters over the tensor-parallel ranks after every backward
    pass. What earlier micro-batches left there would be summed again each time.
    """
    earlier = [(p, p.grad) for p in model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
    for parameter, _ in earlier:
        parameter.grad = None
    yield
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
