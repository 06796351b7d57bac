"""The trainer ranks' own process group, and the device of each."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def rank_device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_world(rank: int, world_size: int, addr: str, port: int, device: torch.device, timeout_s: float) -> None:
    dist.init_process_group(
        backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://{addr}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
