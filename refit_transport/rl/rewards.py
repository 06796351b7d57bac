"""What happens to rewards between the task and the advantages: scaling and shaping by response length."""

from __future__ import annotations

import logging

import torch

from refit_transport.rl.settings import RewardScaling, RewardShaping

logger = logging.getLogger(__name__)


def scale_rewards(rewards: torch.Tensor, scaling: RewardScaling) -> torch.Tensor:
    """[B] rewards, clamped to the source range and mapped linearly to the target range. Raises ValueError for an empty
    source range."""
    if not scaling.enabled:
        return rewards
    width = scaling.source_max - scaling.source_min
    if width <= 0:
        raise ValueError(
            f"reward_scaling: source_min {scaling.source_min} must lie below source_max {scaling.source_max}"
        )
    share = (rewards.clamp(scaling.source_min, scaling.source_max) - scaling.source_min) / width
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def shape_rewards(
    rewards: torch.Tensor, lengths: torch.Tensor, truncated: torch.Tensor, shaping: RewardShaping
) -> torch.Tensor:
    """[B] rewards after the length penalty. ``lengths`` [B] are generated tokens, ``truncated`` [B] bool marks samples
    that ran into the limit.

    With ``stop_properly_penalty_coef`` truncated samples' rewards are multiplied by it. Otherwise the penalty grows
    linearly once a response enters the last ``overlong_buffer_length`` tokens before ``max_response_length``, and
    reaches ``overlong_buffer_penalty`` at that length. Raises ValueError for options out of range."""
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return _penalise_truncation(rewards, truncated, shaping.stop_properly_penalty_coef)
    if shaping.max_response_length is None or shaping.overlong_buffer_length <= 0:
        raise ValueError(
            "reward_shaping: needs max_response_length and overlong_buffer_length above 0, got "
            f"{shaping.max_response_length} and {shaping.overlong_buffer_length}"
        )
    excess = lengths - (shaping.max_response_length - shaping.overlong_buffer_length)
    penalty = -excess / shaping.overlong_buffer_length * shaping.overlong_buffer_penalty
    return rewards + penalty.clamp(max=0.0)


def _penalise_truncation(rewards: torch.Tensor, truncated: torch.Tensor, coefficient: float) -> torch.Tensor:
    if not 0 <= coefficient <= 1:
        raise ValueError(f"reward_shaping.stop_properly_penalty_coef: got {coefficient}, allowed null or 0 to 1")
    return torch.where(truncated, rewards * coefficient, rewards)


def warn_about_ignored_keys(shaping: RewardShaping) -> None:
    """Says once, at the start, that ``stop_properly_penalty_coef`` makes the overlong keys idle."""
    if shaping.enabled and shaping.stop_properly_penalty_coef is not None:
        logger.warning(
            "reward_shaping.stop_properly_penalty_coef is set: overlong_buffer_length, overlong_buffer_penalty and "
            "max_response_length are ignored"
        )
