"""All engine replicas as one generator: prompts are split over them, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from refit_transport.rl.protocols import Completion, SamplingConfig

from .awaiting import await_all
from .engine_actor import EngineActor
from .layout import ClusterLayout
from .placement import actor_options


class EngineGroup:
    """Implements ``rl.protocols.Generation`` over Ray actors, one per replica. ``step_timeout`` bounds every call;
    ``env`` is added to the engines' environment."""

    def __init__(
        self,
        layout: ClusterLayout,
        groups: Sequence[PlacementGroup],
        device: str,
        step_timeout: float,
        env: Mapping[str, str],
    ) -> None:
        self.layout, self._device, self._timeout = layout, device, step_timeout
        self.actors = [
            ray.remote(EngineActor)
            .options(**actor_options(group, 0, layout.ranks_per_replica, device, env))
            .remote(replica)
            for replica, group in enumerate(groups)
        ]
        self.names = [f"engine {replica}" for replica in range(layout.replicas)]

    def start(self, engine_args: dict[str, Any]) -> list[tuple[str, ray.ObjectRef]]:
        """Begin to build all engines; the calls to wait for."""
        return self.calls("start", engine_args, self.layout.ranks_per_replica > 1 or self._device == "cuda")

    def calls(self, method: str, *args: Any) -> list[tuple[str, ray.ObjectRef]]:
        """A method of the actor on every replica."""
        return [(n, getattr(a, method).remote(*args)) for n, a in zip(self.names, self.actors, strict=True)]

    def prepare_for_generation(self) -> None:
        """Engines never sleep: they have devices of their own."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        share = -(-len(prompts) // len(self.actors))
        calls = []
        for replica, (name, actor) in enumerate(zip(self.names, self.actors, strict=True)):
            start = replica * share
            if part := [list(prompt) for prompt in prompts[start : start + share]]:
                seed = None if sampling.seed is None else sampling.seed + start
                calls.append((name, actor.generate.remote(part, replace(sampling, seed=seed))))
        return [completion for part in await_all(calls, "generating", self._timeout) for completion in part]

    def finish_generation(self) -> None:
        """See ``prepare_for_generation``."""

    def weight_versions(self) -> list[int]:
        """The version each replica's workers hold, read back from them; -1 for a stale one."""
        return await_all(self.calls("weight_version"), "reading weight versions", self._timeout)

    def worker_pids(self, replica: int) -> list[int]:
        """Process ids of a replica's workers, by rank."""
        call = (self.names[replica], self.actors[replica].pids.remote())
        return await_all([call], "asking for worker processes", self._timeout)[0]

    def shutdown(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
