"""GRPO: log-probabilities, advantages relative to the prompt's group, one clipped update per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refit_transport.rl.advantage_estimation import AdvantageStage
from refit_transport.rl.batch import Batch
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.losses import ClippedPolicyLoss
from refit_transport.rl.protocols import Policy
from refit_transport.rl.rollout import StepRollouts
from refit_transport.rl.sample_filters import mask_disagreeing
from refit_transport.rl.settings import LoopSettings
from refit_transport.rl.timing import StepTimer


class LogprobStage:
    """Adds the trainer's and the reference's log-probabilities to a batch, those that the options need."""

    def __init__(self, policy: Policy, settings: LoopSettings, loss: LossConfig, timer: StepTimer) -> None:
        self._policy = policy
        self._timer = timer
        self._threshold = settings.seq_logprob_error_threshold
        self._needs_prev = loss.needs_prev_logprobs or loss.use_kl_in_reward or self._threshold is not None
        self._needs_reference = loss.needs_reference_logprobs

    def apply(self, batch: Batch) -> dict[str, float]:
        """Returns the sequence error metrics; masks sequences over ``seq_logprob_error_threshold``."""
        if not (self._needs_prev or self._needs_reference):
            return {}
        with self._timer.phase("logprob_inference_prep"):
            self._policy.prepare_for_logprobs()
        with self._timer.phase("policy_and_reference_logprobs"):
            if self._needs_prev:
                batch["prev_logprobs"] = self._policy.logprobs(batch)
            if self._needs_reference:
                batch["reference_policy_logprobs"] = self._policy.reference_logprobs(batch)
        return mask_disagreeing(batch, self._threshold) if self._needs_prev else {}


class GrpoUpdate:
    """Steps 9 to 12 of a GRPO step."""

    def __init__(self, policy: Policy, settings: LoopSettings, loss: LossConfig, timer: StepTimer) -> None:
        self._policy = policy
        self._timer = timer
        self._logprobs = LogprobStage(policy, settings, loss, timer)
        self._advantages = AdvantageStage(settings, loss)
        self._loss = ClippedPolicyLoss(loss)

    def update(self, step: int, batch: Batch, rollouts: StepRollouts) -> tuple[dict[str, float], bool]:
        metrics = self._logprobs.apply(batch)
        with self._timer.phase("advantage_calculation"):
            metrics |= self._advantages.apply(batch, rollouts)
        with self._timer.phase("training_prep"):
            self._policy.prepare_for_training()
        with self._timer.phase("policy_training"):
            metrics |= self._policy.train(batch, self._loss)
            self._policy.finish_training()
        return metrics, True

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        folder = path / "policy"
        folder.mkdir()
        self._policy.save_checkpoint(folder, extra)

    def load(self, path: Path) -> dict[str, Any]:
        return self._policy.load_checkpoint(path / "policy")
