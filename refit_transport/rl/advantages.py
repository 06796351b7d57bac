"""Advantages of GRPO, GDPO, REINFORCE++ and PPO as pure functions over one step's rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from refit_transport.rl.divergence import kl_estimate


def group_baseline(
    rewards: torch.Tensor, groups: torch.Tensor, leave_one_out: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Baseline and standard deviation (n - 1 in the denominator) per sample over the rewards of its group, both [B].

    ``rewards`` [B] float, ``groups`` [B] int64 names each sample's group in 0..G-1. With ``leave_one_out`` a sample's
    own reward takes no part in its baseline and deviation. A group of one has its own reward as baseline, so that it
    teaches nothing; deviations over fewer than two rewards are zero."""
    count = int(groups.max()) + 1
    # float64, because the variance is a difference of two sums.
    rewards = rewards.double()
    totals = rewards.new_zeros(3, count)
    totals.index_add_(1, groups, torch.stack([torch.ones_like(rewards), rewards, rewards.square()]))
    size, total, squares = totals[:, groups]
    alone = size == 1
    if leave_one_out:
        size, total, squares = size - 1, total - rewards, squares - rewards.square()
    baseline = torch.where(alone, rewards, total / size.clamp(min=1))
    deviations = squares - size * baseline.square()
    variance = (deviations / (size - 1).clamp(min=1)).clamp(min=0)
    negligible = deviations <= 1e-12 * squares.clamp(min=1e-30)
    std = torch.where(alone | (size < 2) | negligible, torch.zeros_like(variance), variance.sqrt())
    return baseline.float(), std.float()


def grpo_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, leave_one_out: bool = True, normalize: bool = True
) -> torch.Tensor:
    """[B] reward minus the group's baseline, divided by ``std + 1e-6`` where the deviation is above zero."""
    baseline, std = group_baseline(rewards, groups, leave_one_out)
    advantages = rewards - baseline
    return torch.where(std > 0, advantages / (std + 1e-6), advantages) if normalize else advantages


def z_score(values: torch.Tensor, mask: torch.Tensor, floor: float = 1e-8) -> torch.Tensor:
    """``values`` centred and divided by their deviation over the positions ``mask`` counts, zero elsewhere. ``floor``
    is the least variance, so that constant values give zeros."""
    counted = mask.sum().clamp(min=1.0)
    mean = (values * mask).sum() / counted
    variance = ((values - mean).square() * mask).sum() / counted
    return (values - mean) * torch.rsqrt(variance.clamp(min=floor)) * mask


def gdpo_advantages(
    components: Mapping[str, torch.Tensor],
    groups: torch.Tensor,
    weights: Mapping[str, float] | None = None,
    leave_one_out: bool = True,
    normalize: bool = True,
) -> torch.Tensor:
    """[B]: GRPO advantages per reward component, their weighted sum, then a z-score over the batch. Components are
    taken in alphabetical order, ``weights`` default to 1. Raises ValueError with fewer than two components or a weight
    for an unknown one."""
    if len(components) < 2:
        raise ValueError(
            f"gdpo needs two or more reward components, got {sorted(components)}: return a dict of rewards"
        )
    weights = dict(weights or {})
    if unknown := sorted(set(weights) - set(components)):
        raise ValueError(f"gdpo reward_weights name unknown components {unknown}, got {sorted(components)}")
    total = torch.zeros(len(groups))
    for name in sorted(components):
        total += weights.get(name, 1.0) * grpo_advantages(components[name], groups, leave_one_out, normalize)
    return z_score(total, torch.ones_like(total))


def reinforce_plus_plus_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    mask: torch.Tensor,
    kl_reward: torch.Tensor | None = None,
    minus_baseline: bool = True,
) -> torch.Tensor:
    """[B, S]: rewards (less the group's plain mean with ``minus_baseline``) over tokens, plus ``kl_reward`` [B, S] per
    token, z-scored over the valid tokens."""
    centred = rewards - _group_mean(rewards, groups) if minus_baseline else rewards
    values = centred.unsqueeze(-1).expand_as(mask)
    return z_score(values if kl_reward is None else values + kl_reward, mask)


def _group_mean(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    totals = rewards.new_zeros(2, int(groups.max()) + 1)
    totals.index_add_(1, groups, torch.stack([torch.ones_like(rewards), rewards]))
    return (totals[1] / totals[0])[groups]


def raw_reward_advantages(rewards: torch.Tensor, mask: torch.Tensor, normalize: bool = False) -> torch.Tensor:
    """[B, S]: the reward on every valid token, z-scored over them if asked."""
    values = rewards.unsqueeze(-1) * mask
    return z_score(values, mask) if normalize else values


def kl_reward(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, penalty: float, kind: str
) -> torch.Tensor:
    """[B, S]: ``-penalty * KL`` per valid token, for a KL penalty paid in the reward instead of the loss."""
    return -penalty * kl_estimate(policy, reference, kind) * mask


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
    """[B, S]: the scalar reward on the last valid token, plus ``extra`` [B, S]; zero elsewhere."""
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = torch.where(mask > 0, positions, -1).amax(-1, keepdim=True)
    placed = torch.where(positions == last, rewards.unsqueeze(-1), 0.0)
    return placed if extra is None else placed + extra * mask


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float = 1.0,
    lam: float | torch.Tensor = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and returns, both [B, S], zero where ``mask`` is.

    ``rewards``, ``values`` and ``mask`` are [B, S]; ``lam`` a number or [B]. Positions that are masked out carry the
    next value and the running advantage across, so that the text of a tool or a user is no transition. The value after
    the last token is zero."""
    advantages = torch.zeros_like(values)
    following = values.new_zeros(values.shape[0])
    running = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        counted = mask[:, t] > 0
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(counted, delta + gamma * lam * running, running)
        following = torch.where(counted, values[:, t], following)
        advantages[:, t] = torch.where(counted, running, 0.0)
    return advantages, (advantages + values) * mask


@dataclass(frozen=True)
class GaeLambdas:
    """``adv_estimator.gae_lambda*``: one decay for both estimates, or separate ones for returns and advantages."""

    gae_lambda: float = 0.95
    gae_lambda_value: float | None = None
    gae_lambda_policy: float | None = None
    length_adaptive_alpha: float = 0.0

    @property
    def decoupled(self) -> bool:
        given = self.gae_lambda_value is not None or self.gae_lambda_policy is not None
        return given or self.length_adaptive_alpha > 0

    def value(self) -> float:
        return self.gae_lambda if self.gae_lambda_value is None else self.gae_lambda_value

    def policy(self, lengths: torch.Tensor) -> float | torch.Tensor:
        """A number, or [B] with ``length_adaptive_alpha``: ``1 - 1 / max(alpha * length, 1)``, within 0 and 1."""
        if self.length_adaptive_alpha > 0:
            scaled = (self.length_adaptive_alpha * lengths).clamp(min=1.0)
            return (1.0 - 1.0 / scaled).clamp(0.0, 1.0)
        return self.gae_lambda if self.gae_lambda_policy is None else self.gae_lambda_policy


def gae_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lambdas: GaeLambdas,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (whitened over valid tokens if asked) and returns, both [B, S], from per-token ``rewards``."""
    advantages, returns = gae(rewards, values, mask, gamma, lambdas.value())
    if lambdas.decoupled:
        advantages, _ = gae(rewards, values, mask, gamma, lambdas.policy(mask.sum(-1)))
    return (z_score(advantages, mask) if normalize else advantages), returns
