"""The outer loop that GRPO and PPO share: resume, collect, update, validate, checkpoint, report."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from refit_transport.rl.batch import Batch
from refit_transport.rl.checkpoints import CheckpointStore, SaveDeadline
from refit_transport.rl.collect import RolloutCollector
from refit_transport.rl.freshness import WeightFreshness
from refit_transport.rl.protocols import Reporter
from refit_transport.rl.rewards import scale_rewards, shape_rewards
from refit_transport.rl.rollout import StepRollouts
from refit_transport.rl.sample_filters import mask_truncated
from refit_transport.rl.settings import CheckpointSettings, LoopSettings
from refit_transport.rl.timing import StepTimer
from refit_transport.rl.validation import Validator

logger = logging.getLogger(__name__)


class Update(Protocol):
    """What an algorithm does with a step's rollouts."""

    def update(self, step: int, batch: Batch, rollouts: StepRollouts) -> tuple[dict[str, float], bool]:
        """Trains on the batch; returns metrics and whether the policy's weights changed."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> None: ...

    def load(self, path: Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class LoopResult:
    steps: int
    weight_version: int
    stopped_by: str
    """``max_num_steps``, ``max_num_epochs`` or ``validation``."""


@dataclass
class TrainingLoop:
    settings: LoopSettings
    checkpointing: CheckpointSettings
    store: CheckpointStore
    collector: RolloutCollector
    validator: Validator
    freshness: WeightFreshness
    update: Update
    reporter: Reporter
    timer: StepTimer
    pad_token_id: int
    length_multiple: int
    step: int = 0
    """Completed steps."""

    def run(self) -> LoopResult:
        """Trains until a limit is reached, from the newest checkpoint if there is one."""
        try:
            return self._run()
        finally:
            self.collector.close()

    def _run(self) -> LoopResult:
        self._resume()
        deadline = SaveDeadline(self.checkpointing.checkpoint_must_save_by)
        if self.step == 0 and self.settings.val_at_start and self.validator.examples:
            self.reporter.step_done(0, self._validate())
        while (limit := self._limit()) is None:
            metrics, satisfied = self._one_step()
            self._checkpoint_if_due(metrics, deadline)
            self.reporter.step_done(self.step, metrics)
            if satisfied:
                limit = "validation"
                break
        return LoopResult(self.step, self.freshness.version, limit)

    @property
    def total_steps(self) -> int:
        """Steps the run has at most; dynamic sampling may reach the last epoch's end sooner."""
        data = self.collector.dataloader
        per_epoch = math.ceil(self.settings.max_num_epochs * data.size / self.settings.num_prompts_per_step)
        return min(self.settings.max_num_steps, per_epoch)

    def _limit(self) -> str | None:
        if self.step >= self.settings.max_num_steps:
            return "max_num_steps"
        return "max_num_epochs" if self.collector.epochs_done() >= self.settings.max_num_epochs else None

    def _one_step(self) -> tuple[dict[str, float], bool]:
        with self.timer.phase("total_step_time"):
            rollouts, metrics = self.collector.collect(self.step)
            batch = self._batch(rollouts, metrics)
            trained, changed = self.update.update(self.step, batch, rollouts)
            if changed:
                self.freshness.weights_changed()
        metrics |= rollouts.metrics() | trained
        metrics["weight_version"] = float(self.freshness.version)
        self.step += 1
        self.reporter.rollouts(self.step, [rollout.row() for rollout in rollouts.rollouts])
        times = self.timer.take()
        rates = _throughput(rollouts, times)
        named = _prefixed("train/", metrics) | _prefixed("timing/train/", times) | rates
        _warn_about_undefined(self.step, named)
        if not self.validator.due(self.step, last=self._limit() is not None):
            return named, False
        validated = self._validate()
        plain = {name.removeprefix("validation/"): value for name, value in validated.items()}
        return named | validated, self.validator.satisfied(plain)

    def _batch(self, rollouts: StepRollouts, metrics: dict[str, float]) -> Batch:
        """Padded batch with final rewards and the sample mask of overlong filtering."""
        with self.timer.phase("data_processing"):
            batch = rollouts.batch(self.pad_token_id, self.length_multiple)
        with self.timer.phase("reward_calculation"):
            scaled = scale_rewards(rollouts.task_rewards(), self.settings.reward_scaling)
            truncated = rollouts.truncated()
            batch["rewards"] = shape_rewards(scaled, rollouts.lengths(), truncated, self.settings.reward_shaping)
            metrics["shaped_reward"] = float(batch["rewards"].mean())
            if self.settings.overlong_filtering:
                metrics["num_overlong_filtered"] = float(mask_truncated(batch, truncated))
        return batch

    def _validate(self) -> dict[str, float]:
        with self.timer.phase("total_validation_time"):
            metrics = self.validator.run()
        return _prefixed("validation/", metrics) | _prefixed("timing/validation/", self.timer.take())

    def _checkpoint_if_due(self, metrics: dict[str, float], deadline: SaveDeadline) -> None:
        near = deadline.due()
        if not self.checkpointing.enabled:
            return
        period = self.checkpointing.save_period
        if near or self._limit() is not None or (period > 0 and self.step % period == 0):
            with self.timer.phase("checkpointing"):
                self.store.save(self.step, metrics, lambda path: self.update.save(path, self._state()))
            metrics |= _prefixed("timing/train/", self.timer.take())

    def _state(self) -> dict[str, Any]:
        """The ``extra`` that the policy saves with its weights."""
        return {"step": self.step, "weight_version": self.freshness.version, **self.collector.state()}

    def _resume(self) -> None:
        if not self.checkpointing.enabled and self.checkpointing.resume_from is None:
            return
        path = self.store.to_resume()
        if path is None:
            return
        state = self.update.load(path)
        self.step = state["step"]
        self.freshness.resume_at(state["weight_version"])
        self.collector.restore(state)


def _throughput(rollouts: StepRollouts, times: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second: of the whole step, and generated ones during generation."""
    measured = rollouts.metrics()["total_num_tokens"], float(rollouts.lengths().sum())
    return {
        "performance/tokens_per_second": measured[0] / times["total_step_time"],
        "performance/generated_tokens_per_second": measured[1] / times["generation"],
    }


def _warn_about_undefined(step: int, metrics: Mapping[str, float]) -> None:
    """A log-probability that is not a number, say, would otherwise show only as a gap in a plot."""
    if undefined := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
        logger.warning("step %d: metrics that are not finite: %s", step, ", ".join(undefined))


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
