"""Off-policy weights: what the trainer's and the engine's probabilities of the same tokens differ by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refit_transport.rl.loss_config import LossConfig


@dataclass(frozen=True)
class ImportanceWeights:
    """Detached weights that broadcast over [B, S]."""

    weights: torch.Tensor
    """[B, S], or [B, 1] for sequence-level weights. Zero where the ratio is not finite."""
    out_of_bounds: torch.Tensor
    """Same shape as ``weights`` (or [B, 1] for seq-mask-tis), float32: 1 where the truncation acted."""


def mean_over_tokens(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, 1] mean over the tokens that ``mask`` counts; 0 for rows without any."""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)


def _finite_or_zero(weights: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(weights), weights, 0.0)


@torch.no_grad()
def importance_weights(log_ratio: torch.Tensor, mask: torch.Tensor, config: LossConfig) -> ImportanceWeights:
    """Weights ``exp(prev - generation)`` from ``log_ratio`` [B, S] (zero where ``mask`` is), truncated as configured:
    ``tis`` clamps, ``icepop`` zeroes what is outside the bounds, ``seq-mask-tis`` zeroes whole sequences whose
    geometric mean is outside. Not-finite ratios give weight zero."""
    by_sequence = config.sequence_level_importance_ratios
    raw = log_ratio.sum(-1, keepdim=True).exp() if by_sequence else log_ratio.exp()
    weights = _finite_or_zero(raw)
    kind = config.truncated_importance_sampling_type
    if kind is None:
        return ImportanceWeights(weights, torch.zeros_like(weights))
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio
    judged = mean_over_tokens(log_ratio, mask).exp() if kind == "seq-mask-tis" else raw
    outside = ~((judged >= low) & (judged <= high))
    kept = weights.clamp(low, high) if kind == "tis" else torch.where(outside, 0.0, weights)
    return ImportanceWeights(torch.where(torch.isfinite(raw), kept, 0.0), outside.float())
