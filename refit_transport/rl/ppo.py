"""PPO: a critic's values, generalised advantages, several epochs of critic and policy updates per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refit_transport.rl.advantage_estimation import AdvantageStage
from refit_transport.rl.batch import Batch
from refit_transport.rl.grpo import LogprobStage
from refit_transport.rl.loss_config import LossConfig, ValueLossConfig
from refit_transport.rl.losses import ClippedPolicyLoss
from refit_transport.rl.metrics import average_updates
from refit_transport.rl.protocols import Policy, Value
from refit_transport.rl.rollout import StepRollouts
from refit_transport.rl.settings import PpoSettings
from refit_transport.rl.timing import StepTimer
from refit_transport.rl.value_loss import ValueLoss, explained_variance


class PpoUpdate:
    """One PPO step on a batch of rollouts. Policy and critic may share devices: one is finished before the other is
    prepared."""

    def __init__(
        self,
        policy: Policy,
        value: Value,
        settings: PpoSettings,
        loss: LossConfig,
        value_loss: ValueLossConfig,
        timer: StepTimer,
    ) -> None:
        self._policy = policy
        self._value = value
        self._settings = settings
        self._timer = timer
        self._logprobs = LogprobStage(policy, settings, loss, timer)
        self._advantages = AdvantageStage(settings, loss)
        self._loss = ClippedPolicyLoss(loss)
        self._value_loss = ValueLoss(value_loss)
        self._has_returns = settings.adv_estimator.name == "gae"

    def update(self, step: int, batch: Batch, rollouts: StepRollouts) -> tuple[dict[str, float], bool]:
        """``step`` counts from 0; before ``policy_training_start_step`` only the critic learns."""
        if self._has_returns:
            self._infer_values(batch)
        metrics = self._logprobs.apply(batch)
        self._policy.finish_training()
        with self._timer.phase("advantage_calculation"):
            metrics |= self._advantages.apply(batch, rollouts)
        train_policy = step >= self._settings.policy_training_start_step
        critic, policy = [], []
        for _ in range(self._settings.ppo_epochs):
            if self._has_returns:
                critic.append(self._train_value(batch))
            if train_policy:
                policy.append(self._train_policy(batch))
        return metrics | average_updates(critic) | average_updates(policy), train_policy

    def _infer_values(self, batch: Batch) -> None:
        with self._timer.phase("policy_offload_after_refit"):
            self._policy.finish_training()
        with self._timer.phase("value_inference"):
            self._value.prepare_for_inference()
            batch["values"] = self._value.values(batch)
            self._value.finish()

    def _train_value(self, batch: Batch) -> dict[str, float]:
        with self._timer.phase("value_training_prep"):
            self._value.prepare_for_training()
        with self._timer.phase("value_training"):
            metrics = self._value.train(batch, self._value_loss)
            self._value.finish()
        named = {name if name.startswith("critic/") else f"critic/{name}": v for name, v in metrics.items()}
        named["critic/explained_var"] = explained_variance(named)
        return named

    def _train_policy(self, batch: Batch) -> dict[str, float]:
        with self._timer.phase("training_prep"):
            self._policy.prepare_for_training()
        with self._timer.phase("policy_training"):
            metrics = self._policy.train(batch, self._loss)
            self._policy.finish_training()
        return metrics

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        for name, model in (("policy", self._policy), ("value", self._value)):
            folder = path / name
            folder.mkdir()
            model.save_checkpoint(folder, extra)

    def load(self, path: Path) -> dict[str, Any]:
        """Raises RuntimeError when policy and critic were saved at different steps."""
        policy, value = self._policy.load_checkpoint(path / "policy"), self._value.load_checkpoint(path / "value")
        if policy != value:
            raise RuntimeError(
                f"resume from {path}: policy and value were saved at different states: {policy}, {value}"
            )
        return policy
