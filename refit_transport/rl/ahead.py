"""Asynchronous GRPO: the engines generate for coming steps in the background, while the trainer trains.

Every step has a *target*: the trainer version that will consume it. With engines at version v, targets up to
v + ``max_age`` are generated, in order and each exactly once, so no rollout is dropped and none is older than
``max_age`` versions when it is trained on. A refit first waits for the generation in progress (no engine ever serves
two versions within one completion), then lets the background go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from refit_transport.rl.collect import RolloutCollector
from refit_transport.rl.freshness import FIRST_VERSION
from refit_transport.rl.rollout import Group, StepRollouts
from refit_transport.rl.timing import StepTimer

STALL_SECONDS = 3600.0
"""Longest wait for the background. Engines have deadlines of their own; this one catches a generation without any."""
CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class ReadyStep:
    """Rollouts that wait for the trainer to reach their target."""

    groups: tuple[Group, ...]
    weight_version: int
    """Of the weights that generated them."""
    next_state: Mapping[str, Any]
    """Where the prompts of the following target begin."""
    seconds: Mapping[str, float]


@dataclass
class AheadCollector(RolloutCollector):
    """A collector whose ``collect`` takes what the background has generated. Call ``close`` at the end."""

    max_age: int = 1

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, ReadyStep] = {}
        self._next_target: int | None = None
        self._paused = True
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="rollouts-ahead", daemon=True)
        self._consumed_state = super().state()

    def state(self) -> dict[str, Any]:
        """Where the first step that was not consumed begins: rollouts that wait are generated again after a resume."""
        return dict(self._consumed_state)

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._consumed_state = super().state()

    def epochs_done(self) -> int:
        return self._consumed_state["dataloader"]["epoch"]

    def collect(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """The rollouts of the trainer's current version, after a refit if the engines are behind."""
        target = self.freshness.version
        with self.engines_to_itself():
            self.freshness.prepare_generation()
            if self._next_target is None:
                self._next_target = target
                self._worker.start()
        with self.timer.phase("idle/buffer_starvation"):
            self._wait(lambda: target in self._ready, f"the rollouts of version {target}")
        with self._changed:
            ready = self._ready.pop(target)
            waiting = len(self._ready)
        self._consumed_state = dict(ready.next_state)
        for phase, seconds in ready.seconds.items():
            self.timer.add(phase, seconds)
        age = float(target - ready.weight_version)
        return StepRollouts(ready.groups), {"avg_trajectory_age": age, "buffer_size": float(waiting)}

    @contextmanager
    def engines_to_itself(self, waiting: str = "idle/refit_bubble") -> Iterator[None]:
        """Lets the generation in progress finish, and starts no other inside; nor afterwards if the inside raises."""
        with self._changed:
            self._paused = True
        with self.timer.phase(waiting):
            self._wait(lambda: not self._busy, "the generation in progress")
        yield
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the background. A generation still in progress is given a moment; the thread does not outlive the
        process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._worker.is_alive():
            self._worker.join(CLOSE_SECONDS)

    def _wait(self, condition: Callable[[], bool], for_what: str) -> None:
        """Raises what the background raised, or TimeoutError."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._error is not None or condition(), STALL_SECONDS)
            if self._error is not None:
                raise RuntimeError("generating ahead of the trainer failed") from self._error
        if not arrived:
            raise TimeoutError(f"asynchronous rollouts: waited {STALL_SECONDS:.0f} s for {for_what}")

    def _work(self) -> None:
        """Body of the background thread."""
        try:
            while (target := self._reserve()) is not None:
                ready = self._generate(target)
                with self._changed:
                    self._ready[target] = ready
                    self._busy = False
                    self._changed.notify_all()
        except BaseException as error:  # reaches the trainer through _wait
            with self._changed:
                self._error = error
                self._busy = False
                self._changed.notify_all()

    def _reserve(self) -> int | None:
        """The next target, once it may be generated; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_start())
            if self._closed:
                return None
            self._busy = True
            self._next_target += 1
            return self._next_target - 1

    def _may_start(self) -> bool:
        last_target = self.settings.max_num_steps - 1 + FIRST_VERSION
        newest = min(self.freshness.engine_version + self.max_age, last_target)
        return not self._paused and self._next_target <= newest

    def _generate(self, target: int) -> ReadyStep:
        timer = StepTimer()
        version = self.freshness.engine_version
        prompts = self.settings.num_prompts_per_step
        groups = self._draw_groups(prompts, target - FIRST_VERSION, 0, timer)
        return ReadyStep(tuple(groups), version, super().state(), timer.take())
