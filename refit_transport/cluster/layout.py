"""How many ranks each side has, and where its actors go. Computed from the configuration alone, before Ray starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Joint ranks: trainers first, then each engine replica's workers in turn."""

    trainer_ranks: int
    replicas: int
    ranks_per_replica: int
    """TP x PP of one engine."""

    @property
    def engine_ranks(self) -> int:
        return self.replicas * self.ranks_per_replica

    @property
    def world_size(self) -> int:
        return self.trainer_ranks + self.engine_ranks

    def rank_offset(self, replica: int) -> int:
        """Joint rank of the first worker of ``replica``."""
        return self.trainer_ranks + replica * self.ranks_per_replica


def cluster_layout(tree: Mapping[str, Any]) -> ClusterLayout:
    """Ranks of both sides: ``cluster.gpus_per_node`` x ``cluster.num_nodes`` in all, of which
    ``policy.generation.colocated.resources`` gives some to generation: ``gpus_per_node`` on a single node, else
    ``num_nodes`` whole nodes. Raises ValueError when nothing is left for one side."""
    cluster, generation = tree["cluster"], tree["policy"]["generation"]
    total = cluster["gpus_per_node"] * cluster["num_nodes"]
    resources, vllm = generation["colocated"]["resources"], generation["vllm_cfg"]
    given = resources["gpus_per_node"] or 0
    if cluster["num_nodes"] > 1:
        given = (resources["num_nodes"] or 0) * (given or cluster["gpus_per_node"])
    per_replica = vllm["tensor_parallel_size"] * vllm["pipeline_parallel_size"]
    layout = ClusterLayout(total - given, given // per_replica, per_replica)
    if layout.trainer_ranks < 1 or layout.replicas < 1 or given % per_replica:
        raise ValueError(
            f"cluster of {total} ranks: generation gets {given}, training {total - given}; each needs one or more, "
            f"and generation a multiple of TP x PP = {per_replica} "
            "(set policy.generation.colocated.resources and policy.generation.vllm_cfg)"
        )
    return layout
