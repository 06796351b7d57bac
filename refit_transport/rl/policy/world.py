"""The trainer ranks' own process groups, and the device of each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TrainerWorld:
    """This rank's place among the trainers."""

    device: torch.device
    control: dist.ProcessGroup
    """All ranks, for Python objects and CPU tensors."""
    owned: bool
    """Whether the default process group was made here."""

    @classmethod
    def join(cls, rank: int, world_size: int, addr: str, port: int, timeout_s: float) -> TrainerWorld:
        """A default process group that the process already has is used; else one is made at ``addr:port``. Every rank
        calls it. ``timeout_s`` bounds the collectives of both groups."""
        device, timeout = _rank_device(rank), timedelta(seconds=timeout_s)
        owned = not dist.is_initialized()
        if owned:
            dist.init_process_group(
                backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=f"tcp://{addr}:{port}",
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
        return cls(device, dist.new_group(backend="gloo", timeout=timeout), owned)

    def leave(self) -> None:
        """Ends the process group that was made here. A process that used gloo should then end with ``os._exit``."""
        if self.owned:
            dist.destroy_process_group()


def _rank_device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
