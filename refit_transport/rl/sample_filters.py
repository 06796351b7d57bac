"""Which samples of a step are not trained on: truncated ones, and ones the engine and the trainer disagree about."""

from __future__ import annotations

import torch

from refit_transport.rl.batch import Batch, loss_mask
from refit_transport.rl.divergence import mult_prob_error


def mask_truncated(batch: Batch, truncated: torch.Tensor) -> int:
    """Overlong filtering: zeroes the sample mask where ``truncated`` [B] bool is set. Returns how many were dropped."""
    dropped = truncated & (batch["sample_mask"] > 0)
    batch["sample_mask"] = torch.where(truncated, 0.0, batch["sample_mask"])
    return int(dropped.sum())


def sequence_errors(batch: Batch) -> torch.Tensor:
    """[B] mean of ``exp(|generation - trainer|)`` over each sample's tokens; 1 for samples without any."""
    mask = batch["token_mask"]
    error = torch.where(mask > 0, mult_prob_error(batch["generation_logprobs"], batch["prev_logprobs"]), 0.0)
    count = mask.sum(-1)
    return torch.where(count > 0, error.sum(-1) / count.clamp(min=1.0), 1.0)


def mask_disagreeing(batch: Batch, threshold: float | None) -> dict[str, float]:
    """Zeroes the sample mask of sequences whose error exceeds ``threshold`` (or is not a number); None only measures.
    Returns the step's sequence error metrics over the samples that were still in it."""
    if not bool((loss_mask(batch) > 0).any()):
        return {"num_masked_seqs_by_logprob_error": 0.0}
    considered = batch["sample_mask"] > 0
    errors = sequence_errors(batch)
    metrics = _spread(errors[considered], "")
    masked = torch.zeros_like(considered) if threshold is None else considered & ~(errors <= threshold)
    batch["sample_mask"] = torch.where(masked, 0.0, batch["sample_mask"])
    metrics["num_masked_seqs_by_logprob_error"] = float(masked.sum())
    if masked.any():
        metrics["masked_correct_pct"] = float((batch["rewards"][masked] > 0).float().mean())
        if (kept := errors[considered & ~masked]).numel():
            metrics |= _spread(kept, "_after_mask")
    return metrics


def _spread(errors: torch.Tensor, suffix: str) -> dict[str, float]:
    return {
        f"max_seq_mult_prob_error{suffix}": float(errors.max()),
        f"mean_seq_mult_prob_error{suffix}": float(errors.mean()),
        f"min_seq_mult_prob_error{suffix}": float(errors.min()),
    }
