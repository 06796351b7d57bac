"""All trainer ranks as one policy: every method is called on every rank, since each is a collective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup

from refit_transport.rl.batch import Batch
from refit_transport.rl.protocols import Loss

from .awaiting import await_all
from .layout import ClusterLayout
from .placement import actor_options
from .trainer_actor import TrainerActor


class TrainerGroup:
    """Ray actors, one per trainer rank, with their workers. ``step_timeout`` bounds every call, in seconds."""

    def __init__(self, layout: ClusterLayout, group: PlacementGroup, device: str, step_timeout: float) -> None:
        self._timeout = step_timeout
        self.actors = [
            ray.remote(TrainerActor).options(**actor_options(group, rank, 1, device)).remote(rank)
            for rank in range(layout.trainer_ranks)
        ]
        self.names = [f"trainer rank {rank}" for rank in range(layout.trainer_ranks)]

    def start(self, classes: dict[str, type], tree: dict[str, Any]) -> list[tuple[str, ray.ObjectRef]]:
        """Begin to build all workers; the calls to wait for."""
        opening = [(self.names[0], self.actors[0].open_store.remote())]
        ((address, port),) = await_all(opening, "opening the trainers' store", self._timeout)
        return self.calls("start", classes, len(self.actors), address, port, tree, self._timeout)

    def calls(self, method: str, *args: Any) -> list[tuple[str, ray.ObjectRef]]:
        """A method of the actor on every rank."""
        return [(n, getattr(a, method).remote(*args)) for n, a in zip(self.names, self.actors, strict=True)]

    def worker(self, method: str, *args: Any, doing: str, worker: str = "policy") -> list[Any]:
        """A method of a worker on every rank; what each returned."""
        return await_all(self.calls("call", worker, method, *args), doing, self._timeout)

    def rows(self, method: str, batch: Batch, doing: str, worker: str = "policy") -> torch.Tensor:
        """float32 [n, s]: the rows that the data-parallel ranks computed, in the order of the batch."""
        parts = await_all(self.calls("rows", worker, method, ray.put(batch)), doing, self._timeout)
        return torch.cat([part for part in parts if part is not None])

    def shutdown(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


class RemotePolicy:
    """Implements ``rl.protocols.Policy`` over a trainer group."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group

    def prepare_for_logprobs(self) -> None:
        """The weights are always in place."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return self._group.rows("logprobs", batch, "computing log-probabilities")

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        return self._group.rows("reference_logprobs", batch, "computing reference log-probabilities")

    def prepare_for_training(self) -> None:
        """The optimizer is always in place."""

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        return self._group.worker("train", ray.put(batch), loss, doing="training")[0]

    def finish_training(self) -> None:
        """Nothing is offloaded."""

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        self._group.worker("save_checkpoint", str(path.resolve()), dict(extra), doing="saving a checkpoint")

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        return self._group.worker("load_checkpoint", str(path.resolve()), doing="loading a checkpoint")[0]


class RemoteValue:
    """Implements ``rl.protocols.Value`` over the value workers of a trainer group."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group

    def prepare_for_inference(self) -> None:
        """The weights are always in place."""

    def values(self, batch: Batch) -> torch.Tensor:
        return self._group.rows("values", batch, "computing values", worker="value")

    def prepare_for_training(self) -> None:
        """The optimizer is always in place."""

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        return self._group.worker("train", ray.put(batch), loss, doing="training the value model", worker="value")[0]

    def finish(self) -> None:
        """Nothing is offloaded."""

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        doing = "saving the value model"
        self._group.worker("save_checkpoint", str(path.resolve()), dict(extra), doing=doing, worker="value")

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        doing = "loading the value model"
        return self._group.worker("load_checkpoint", str(path.resolve()), doing=doing, worker="value")[0]
