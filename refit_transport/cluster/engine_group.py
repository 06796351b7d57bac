"""All engines as one generator: prompts are split over them, in order, by the ranks of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from refit_transport.rl.protocols import Completion, SamplingConfig

from .awaiting import await_all
from .data_parallel import core_env
from .engine_actor import EngineActor
from .layout import ClusterLayout, shares
from .placement import actor_options


class EngineGroup:
    """Implements ``rl.protocols.Generation`` over Ray actors, one per engine core. ``step_timeout`` bounds every call;
    ``envs`` holds, per engine, what is added to its environment."""

    def __init__(
        self,
        layout: ClusterLayout,
        groups: Sequence[PlacementGroup],
        device: str,
        step_timeout: float,
        envs: Sequence[Mapping[str, str]],
    ) -> None:
        self.layout, self._device, self._timeout = layout, device, step_timeout
        self.actors = [
            ray.remote(EngineActor)
            .options(**actor_options(group, 0, core.shape.core_ranks, device, envs[core.replica]))
            .remote(core.replica, core.name)
            for core, group in zip(layout.cores, groups, strict=True)
        ]
        self.names = [core.name for core in layout.cores]

    def start(self, engine_args: Sequence[dict[str, Any]], progress_bar: bool) -> list[tuple[str, ray.ObjectRef]]:
        """Begin to build all engines, each from its ``engine_args``; the calls to wait for."""
        meetings = self._data_parallel_addresses()
        calls = []
        for core, name, actor in zip(self.layout.cores, self.names, self.actors, strict=True):
            parallel = core.shape.core_ranks > 1 or self._device == "cuda"
            meeting = meetings.get(core.replica)
            env = core_env(core.data_rank, core.shape.data, *meeting) if meeting else {}
            calls.append((name, actor.start.remote(engine_args[core.replica], parallel, env, progress_bar)))
        return calls

    def _data_parallel_addresses(self) -> dict[int, tuple[str, int]]:
        """By engine, for those with several cores: host and port of the first."""
        first = [
            (core.replica, (name, actor.data_parallel_address.remote()))
            for core, name, actor in zip(self.layout.cores, self.names, self.actors, strict=True)
            if core.shape.data > 1 and core.data_rank == 0
        ]
        found = await_all([call for _, call in first], "finding ports for data parallelism", self._timeout)
        return dict(zip((replica for replica, _ in first), found, strict=True))

    def calls(self, method: str, *args: Any) -> list[tuple[str, ray.ObjectRef]]:
        """A method of the actor on every engine core."""
        return [(n, getattr(a, method).remote(*args)) for n, a in zip(self.names, self.actors, strict=True)]

    def prepare_for_generation(self) -> None:
        """Engines never sleep: they have devices of their own."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        parts = shares(len(prompts), tuple(core.shape.core_ranks for core in self.layout.cores))
        busy = {core.replica for core, part in zip(self.layout.cores, parts, strict=True) if part}
        calls = []
        for core, name, actor, part in zip(self.layout.cores, self.names, self.actors, parts, strict=True):
            if core.replica in busy:
                own = [list(prompts[index]) for index in part]
                calls.append((name, actor.generate.remote(*_work(own, part.start, list(prompts[0]), sampling))))
        wanted = [len(part) for core, part in zip(self.layout.cores, parts, strict=True) if core.replica in busy]
        answers = await_all(calls, "generating", self._timeout)
        return [one for answer, count in zip(answers, wanted, strict=True) for one in answer[:count]]

    def finish_generation(self) -> None:
        """See ``prepare_for_generation``."""

    def weight_versions(self) -> list[int]:
        """The version each engine's workers hold, read back from them; -1 for a stale one."""
        versions: dict[int, set[int]] = {}
        answers = await_all(self.calls("weight_version"), "reading weight versions", self._timeout)
        for core, version in zip(self.layout.cores, answers, strict=True):
            versions.setdefault(core.replica, set()).add(version)
        return [held.pop() if len(held) == 1 else -1 for held in versions.values()]

    def worker_pids(self, replica: int) -> list[int]:
        """Process ids of an engine's workers, by rank."""
        calls = [
            (name, actor.pids.remote())
            for core, name, actor in zip(self.layout.cores, self.names, self.actors, strict=True)
            if core.replica == replica
        ]
        return [pid for pids in await_all(calls, "asking for worker processes", self._timeout) for pid in pids]

    def shutdown(self) -> None:
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


def _work(
    own: list[list[int]], first: int, any_prompt: list[int], sampling: SamplingConfig
) -> tuple[list[list[int]], SamplingConfig]:
    """Prompts of a core, of which the first has index ``first`` in the whole call. A core without any has to compute
    beside the others of its engine: it gets one token to make, which nobody reads."""
    if not own:
        return [any_prompt], replace(sampling, max_new_tokens=1)
    return own, replace(sampling, seed=None if sampling.seed is None else sampling.seed + first)
