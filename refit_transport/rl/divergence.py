"""Per-token estimates of how far two policies are apart, from the log-probabilities of the sampled tokens."""

from __future__ import annotations

import math

import torch


def kl_estimate(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    kind: str = "k3",
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token, same shape as the inputs, for tokens sampled from the policy.

    k1 is the log-ratio (unbiased, noisy, can be negative), k2 half its square (biased, low variance), k3
    ``exp(-x) - 1 + x`` (unbiased, never negative). The log-ratio is clamped to ±``input_clamp``, the estimate to
    ±``output_clamp``."""
    log_ratio = logprobs - reference
    if input_clamp is not None:
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        estimate = log_ratio
    elif kind == "k2":
        estimate = 0.5 * log_ratio.square()
    elif kind == "k3":
        estimate = torch.expm1(-log_ratio) + log_ratio
    else:
        raise ValueError(f"KL estimate: got {kind!r}, allowed 'k1', 'k2' or 'k3'")
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def js_estimate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Estimate of the Jensen-Shannon divergence per token: mean of both k3 estimates against the mixture."""
    mixture = torch.logaddexp(first, second) - math.log(2)
    return 0.5 * (kl_estimate(first, mixture) + kl_estimate(second, mixture))


def mult_prob_error(generation: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """``exp(|log p_generation - log p_trainer|)`` per token; 1 where both agree."""
    return (generation - trainer).abs().exp()
