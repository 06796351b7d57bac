"""Which part of an engine a vLLM worker is, read from vLLM's own configuration of the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """Coordinates of a worker in its engine."""

    data: int
    pipeline: int
    tensor: int
    in_core: int
    """Rank among the workers of one data-parallel core."""
    in_engine: int
    """Rank among all workers of the engine, core after core."""

    @classmethod
    def of(cls, parallel: Any) -> WorkerRank:
        """From a worker's ``ParallelConfig``. vLLM orders ranks by data, pipeline, prefill-context and tensor
        parallelism. ``data_parallel_rank`` would be 0 on every replica of a dense model, ``data_parallel_index`` is
        not. Under an external launcher world size and rank count all cores."""
        core = parallel.world_size
        rank = parallel.rank
        if parallel.distributed_executor_backend == "external_launcher":
            core //= parallel.data_parallel_size
            rank %= core
        data = parallel.data_parallel_index
        stage = core // parallel.pipeline_parallel_size
        return cls(data, rank // stage, rank % parallel.tensor_parallel_size, rank, data * core + rank)

    @property
    def labels(self) -> dict[str, str]:
        """For messages and reports."""
        coordinates = {"dp": self.data, "pp": self.pipeline, "tp": self.tensor}
        return {"worker": str(self.in_engine), **{name: str(value) for name, value in coordinates.items()}}
