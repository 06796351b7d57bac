"""This rank's place in the process groups that cut a Megatron model's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class GroupRank:
    """Number of ranks in a group, and this one's number among them."""

    size: int
    rank: int


@dataclass(frozen=True, slots=True)
class TensorGroups:
    """What cuts dense tensors, and what cuts the tensors of an expert."""

    dense: GroupRank
    expert: GroupRank


def tensor_groups(model: nn.Module) -> TensorGroups:
    """The groups that ``model`` was built with: its own where it keeps them, else those of ``parallel_state``."""
    from megatron.core import parallel_state

    own = getattr(model, "pg_collection", None)
    dense = getattr(own, "tp", None) or parallel_state.get_tensor_model_parallel_group()
    expert = getattr(own, "expt_tp", None) or parallel_state.get_expert_tensor_parallel_group()
    return TensorGroups(_place(dense), _place(expert))


def _place(group: Any) -> GroupRank:
    return GroupRank(dist.get_world_size(group), dist.get_rank(group))
