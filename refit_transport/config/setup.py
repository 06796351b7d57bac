"""What a configuration asks for, in numbers: ranks, replicas, parallel sizes, the model. Rules are written on this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refit_transport.config.check import select
from refit_transport.config.engine_shape import EngineShape, engine_cfgs
from refit_transport.config.model_facts import ModelFacts, read_model_config
from refit_transport.transports.registry import DEFAULT


@dataclass(frozen=True, slots=True)
class Cluster:
    """What there really is, as found by whoever starts the run."""

    nodes: int
    gpus_per_node: int


@dataclass(frozen=True)
class Setup:
    """A checked configuration, as plain nested data, with derived numbers."""

    config: Mapping[str, Any]
    cluster: Cluster | None = None
    broken: frozenset[str] = frozenset()
    """Keys that are wrong by themselves; they stand at their defaults here."""

    def get(self, path: str) -> Any:
        return select(self.config, path)

    @cached_property
    def model(self) -> ModelFacts | None:
        """Facts of the policy's model; None when its configuration is not on this machine."""
        return self._facts_of("policy")

    @cached_property
    def value_model(self) -> ModelFacts | None:
        """Facts of the value model, as ``model``."""
        return self._facts_of("value")

    def _facts_of(self, section: str) -> ModelFacts | None:
        name = self.get(f"{section}.model_name")
        found = read_model_config(name, self.get(f"{section}.hf_config_overrides")) if name else None
        return ModelFacts.from_config(found) if found else None

    @property
    def algorithm(self) -> str:
        return "ppo" if "ppo" in self.config else "grpo"

    @property
    def transport(self) -> str:
        return self.get("policy.generation.refit_transport") or DEFAULT

    @property
    def trainer(self) -> str:
        return "megatron" if self.get("policy.megatron_cfg.enabled") else "dtensor"

    @property
    def colocated(self) -> bool:
        return bool(self.get("policy.generation.colocated.enabled"))

    @property
    def world(self) -> int:
        """Ranks of trainers and engines together."""
        return self.get("cluster.num_nodes") * self.get("cluster.gpus_per_node")

    @property
    def generation_ranks(self) -> int:
        """Ranks given to generation, 0 when nothing says how many."""
        nodes = self.get("cluster.num_nodes")
        given_nodes = self.get("policy.generation.colocated.resources.num_nodes")
        given_gpus = self.get("policy.generation.colocated.resources.gpus_per_node")
        if nodes == 1:
            return given_gpus or 0
        return (given_nodes or 0) * (given_gpus or self.get("cluster.gpus_per_node"))

    @property
    def train_ranks(self) -> int:
        return self.world - self.generation_ranks

    @property
    def engine_shape(self) -> EngineShape:
        """What ``policy.generation.vllm_cfg`` says of an engine that sets nothing else."""
        return EngineShape.of(self.get("policy.generation.vllm_cfg"))

    @property
    def engines(self) -> tuple[EngineShape, ...]:
        """Every engine; none when the ranks that generate hold none."""
        return tuple(map(EngineShape.of, engine_cfgs(self.get("policy.generation"), self.generation_ranks)))

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel ranks of the trainer."""
        return self.get(self.tensor_parallel_key)

    @property
    def tensor_parallel_key(self) -> str:
        if self.trainer == "megatron":
            return "policy.megatron_cfg.tensor_model_parallel_size"
        return "policy.dtensor_cfg.tensor_parallel_size"

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica's activations; the others are data parallel."""
        pipeline = self.get("policy.megatron_cfg.pipeline_model_parallel_size") if self.trainer == "megatron" else 1
        return self.tensor_parallel * pipeline

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks of the trainer, 0 when the layout is incomplete or does not divide."""
        ranks = self.train_ranks if self.generation_ranks else 0
        return ranks // self.model_parallel if ranks > 0 and ranks % self.model_parallel == 0 else 0

    @property
    def value_data_parallel(self) -> int:
        """Data-parallel ranks of the value model, 0 when the layout is incomplete or does not divide."""
        tensor = self.get("value.dtensor_cfg.tensor_parallel_size")
        ranks = self.train_ranks if self.generation_ranks else 0
        return ranks // tensor if ranks > 0 and ranks % tensor == 0 else 0
