"""How many ranks each side has, and where its actors go. Computed from the configuration alone, before Ray starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from refit_transport.config.engine_shape import EngineShape, engine_cfgs


@dataclass(frozen=True, slots=True)
class EngineCore:
    """What one engine actor runs: a data-parallel rank of an engine, or the whole of one that has no others."""

    replica: int
    data_rank: int
    shape: EngineShape

    @property
    def name(self) -> str:
        core = f" core {self.data_rank}" if self.shape.data > 1 else ""
        return f"engine {self.replica}{core}"


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Joint ranks: trainers first, then each engine's workers in turn, core after core."""

    trainer_ranks: int
    engines: tuple[EngineShape, ...]

    @property
    def cores(self) -> tuple[EngineCore, ...]:
        return tuple(
            EngineCore(replica, data_rank, shape)
            for replica, shape in enumerate(self.engines)
            for data_rank in range(shape.data)
        )

    @property
    def engine_ranks(self) -> int:
        return sum(shape.ranks for shape in self.engines)

    @property
    def world_size(self) -> int:
        return self.trainer_ranks + self.engine_ranks

    def rank_offset(self, replica: int) -> int:
        """Joint rank of the first worker of ``replica``. Workers add their rank in the engine, over all its cores."""
        return self.trainer_ranks + sum(shape.ranks for shape in self.engines[:replica])

    def __str__(self) -> str:
        engines = ", ".join(f"{shape} ({shape.ranks})" for shape in self.engines)
        return f"{self.trainer_ranks} trainer ranks + {self.engine_ranks} inference ranks of engines {engines}"


def cluster_layout(tree: Mapping[str, Any]) -> ClusterLayout:
    """Ranks of both sides: ``cluster.gpus_per_node`` x ``cluster.num_nodes`` in all, of which
    ``policy.generation.colocated.resources`` gives some to generation: ``gpus_per_node`` on a single node, else
    ``num_nodes`` whole nodes. Raises ValueError when nothing is left for one side, or engines leave ranks over."""
    cluster, generation = tree["cluster"], tree["policy"]["generation"]
    total = cluster["gpus_per_node"] * cluster["num_nodes"]
    resources = generation["colocated"]["resources"]
    given = resources["gpus_per_node"] or 0
    if cluster["num_nodes"] > 1:
        given = (resources["num_nodes"] or 0) * (given or cluster["gpus_per_node"])
    layout = ClusterLayout(total - given, tuple(map(EngineShape.of, engine_cfgs(generation, given))))
    if layout.trainer_ranks < 1 or not layout.engines or layout.engine_ranks != given:
        engine = EngineShape.of(generation["vllm_cfg"])
        wanted = (
            f"a multiple of the {engine.ranks} ranks of an engine (data x tensor x pipeline)"
            if generation.get("replicas") is None
            else f"the {layout.engine_ranks} ranks of policy.generation.replicas"
        )
        raise ValueError(
            f"cluster of {total} ranks: generation gets {given}, training {total - given}; each needs one or more, "
            f"and generation {wanted} (set policy.generation.colocated.resources and policy.generation.vllm_cfg)"
        )
    return layout


def shares(count: int, weights: tuple[int, ...]) -> list[range]:
    """``count`` things in order, cut into one range per weight, each as long as its weight says, to within one."""
    ends = [count * upto // sum(weights) for upto in accumulate(weights)]
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
