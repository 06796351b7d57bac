"""Loads a Hugging Face model and shards it over the ranks: FSDP2 or HSDP, or transformers' own TP, EP and FSDP2."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def load_sharded(
    auto_class: Any, config: Mapping[str, Any], sizes: ParallelSizes, device: torch.device, wrap: Callable | None = None
) -> torch.nn.Module:
    """The model of ``config["model_name"]`` (a local directory) with float32 parameters, sharded over all ranks.

    ``precision`` is the dtype of the forward and backward pass; gradients are reduced in float32. ``wrap`` turns the
    loaded model into the module that is sharded (for adapters or a value head).
    """
    cfg = config.get("dtensor_cfg") or {}
    options = {"dtype": torch.float32, "local_files_only": True, **(config.get("hf_config_overrides") or {})}
    if sizes.tp > 1:
        model = _load_tensor_parallel(auto_class, config, sizes, options, wrap)
    else:
        model = auto_class.from_pretrained(config["model_name"], **options).to(device)
        model = wrap(model) if wrap else model
    backbone = getattr(model, "backbone", model)
    backbone.config.use_cache = False
    if cfg.get("activation_checkpointing"):
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if sizes.tp == 1:
        mesh = init_device_mesh(
            device.type, (sizes.dp_replicate, sizes.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        shard_layers(model, mesh if sizes.dp_replicate > 1 else mesh["dp_shard"], config)
    return model


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


def _load_tensor_parallel(
    auto_class: Any, config: Mapping[str, Any], sizes: ParallelSizes, options: dict[str, Any], wrap: Callable | None
) -> torch.nn.Module:
    from transformers.distributed import DistributedConfig

    if wrap is not None:
        raise ValueError(
            f"policy.dtensor_cfg.tensor_parallel_size: got {sizes.tp}, allowed 1 with LoRA or a value head"
        )
    cfg = config.get("dtensor_cfg") or {}
    precision = config.get("precision") or "float32"
    if precision == "float16":
        raise ValueError(
            f"policy.precision: got float16 with tensor_parallel_size {sizes.tp}, allowed float32, bfloat16"
        )
    os.environ.setdefault("LOCAL_RANK", "0")
    distributed = DistributedConfig(
        tp_size=sizes.tp,
        fsdp_size=sizes.dp_shard,
        ep_size=sizes.ep,
        fsdp_cpu_offload=bool(cfg.get("cpu_offload")),
        fsdp_mixed_precision=precision == "bfloat16",
    )
    return auto_class.from_pretrained(config["model_name"], distributed_config=distributed, **options)


def local_shards(model: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's shard of every trained parameter, live, without gradients."""
    if isinstance(model, FSDPModule):
        model.reshard()  # a forward pass without backward leaves the root's parameters gathered
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return [p.to_local() if isinstance(p, DTensor) else p for p in trained]
