"""Chooses and applies the configured advantage estimator to a step's batch."""

from __future__ import annotations

import torch

from refit_transport.rl import advantages as formulas
from refit_transport.rl.batch import Batch, loss_mask
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.rollout import StepRollouts
from refit_transport.rl.settings import AdvantageEstimator, LoopSettings


class AdvantageStage:
    """Writes ``advantages`` (and ``returns`` for GAE) into a batch whose ``rewards`` and masks are final."""

    def __init__(self, settings: LoopSettings, loss: LossConfig) -> None:
        self._settings = settings
        self._loss = loss
        self._estimator: AdvantageEstimator = settings.adv_estimator

    def apply(self, batch: Batch, rollouts: StepRollouts) -> dict[str, float]:
        """Returns the step's ``advantages/*`` metrics, over the tokens trained on."""
        mask = loss_mask(batch)
        advantages = self._estimate(batch, rollouts, mask)
        low, high = self._settings.advantage_clip_low, self._settings.advantage_clip_high
        if low is not None or high is not None:
            advantages = advantages.clamp(low, high)
        batch["advantages"] = advantages
        counted = advantages[mask > 0]
        if not counted.numel():
            return {}
        return {
            "advantages/mean": float(counted.mean()),
            "advantages/max": float(counted.max()),
            "advantages/min": float(counted.min()),
        }

    def _estimate(self, batch: Batch, rollouts: StepRollouts, mask: torch.Tensor) -> torch.Tensor:
        rewards, groups = batch["rewards"], rollouts.group_ids()
        estimator = self._estimator
        if estimator.name == "gae":
            placed = formulas.token_rewards(rewards, mask, self._kl_reward(batch, mask))
            advantages, batch["returns"] = formulas.gae_advantages(
                placed, batch["values"], mask, estimator.gae_gamma, estimator.lambdas, estimator.normalize_advantages
            )
            return advantages
        if estimator.name == "raw_reward":
            return formulas.raw_reward_advantages(rewards, mask, estimator.normalize_advantages)
        if estimator.name == "reinforce_plus_plus":
            kl = self._kl_reward(batch, mask)
            return formulas.reinforce_plus_plus_advantages(rewards, groups, mask, kl, estimator.minus_baseline)
        leave_one_out = self._or(estimator.use_leave_one_out_baseline, self._settings.use_leave_one_out_baseline)
        normalize = self._or(estimator.normalize_rewards, self._settings.normalize_rewards)
        if estimator.name == "gdpo":
            per_sample = formulas.gdpo_advantages(
                rollouts.components(), groups, estimator.reward_weights, leave_one_out, normalize
            )
        else:
            per_sample = formulas.grpo_advantages(rewards, groups, leave_one_out, normalize)
        return per_sample.unsqueeze(-1) * mask

    @staticmethod
    def _or(own: bool | None, inherited: bool) -> bool:
        return inherited if own is None else own

    def _kl_reward(self, batch: Batch, mask: torch.Tensor) -> torch.Tensor | None:
        if not self._loss.use_kl_in_reward:
            return None
        penalty, kind = self._loss.reference_policy_kl_penalty, self._loss.reference_policy_kl_type
        return formulas.kl_reward(batch["prev_logprobs"], batch["reference_policy_logprobs"], mask, penalty, kind)
