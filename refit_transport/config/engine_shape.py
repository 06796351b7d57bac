"""The engines that a configuration asks for: their parallel sizes, and the ranks that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Parallel sizes of one engine."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """1, or data x tensor."""

    @classmethod
    def of(cls, vllm_cfg: Mapping[str, Any]) -> EngineShape:
        return cls(
            vllm_cfg["tensor_parallel_size"], vllm_cfg["pipeline_parallel_size"], vllm_cfg["expert_parallel_size"]
        )

    @property
    def data(self) -> int:
        """Data-parallel cores. vLLM spreads experts over data x tensor parallel ranks, so more expert than tensor
        parallelism means several cores, each with attention and requests of its own."""
        return max(1, self.expert // self.tensor)

    @property
    def core_ranks(self) -> int:
        """Ranks of one core."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        return self.data * self.core_ranks

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "EP": self.expert, "DP": self.data}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "TP1"


def engine_cfgs(generation: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any], ...]:
    """``policy.generation.vllm_cfg`` of every engine, with what the engine's item of ``policy.generation.replicas``
    sets instead. Without that list: as many equal engines as fit ``ranks``."""
    base, replicas = generation["vllm_cfg"], generation.get("replicas")
    if replicas is None:
        return (dict(base),) * (ranks // EngineShape.of(base).ranks)
    return tuple({**base, **item} for item in replicas)
