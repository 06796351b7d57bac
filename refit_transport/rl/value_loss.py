"""The critic's clipped squared error of PPO, normalised over the global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from refit_transport.rl.batch import Batch, loss_mask
from refit_transport.rl.loss_config import ValueLossConfig
from refit_transport.rl.losses import Metrics, divide, masked, masked_extremes


class ValueLoss:
    """``loss(values, batch, sums)``: half the squared error against ``returns``, where a step further than
    ``cliprange`` from the old value earns nothing. Adds up over micro-batches as ``ClippedPolicyLoss`` does."""

    def __init__(self, config: ValueLossConfig) -> None:
        self.config = config

    def __call__(self, values: torch.Tensor, batch: Batch, sums: Mapping[str, float]) -> tuple[torch.Tensor, Metrics]:
        """``values`` [B, S] with gradient, aligned with ``input_ids``. Returns the loss and detached scalar metrics."""
        mask = loss_mask(batch)
        values = masked(values.float(), mask)
        returns = masked(batch["returns"], mask)
        error = (values - returns).square()
        clipped = torch.zeros_like(error)
        worst = error
        if self.config.cliprange is not None:
            old = masked(batch["values"], mask)
            near = torch.minimum(torch.maximum(values, old - self.config.cliprange), old + self.config.cliprange)
            clipped_error = (near - returns).square()
            clipped = (clipped_error > error).float()
            worst = torch.maximum(error, clipped_error)
        loss = divide(0.5 * self.config.scale * (worst * mask).sum(), sums["tokens"])
        metrics = {
            "critic/loss": loss,
            "critic/values_mean": divide(values.sum(), sums["tokens"]),
            "critic/returns_mean": divide(returns.sum(), sums["tokens"]),
            "critic/clipfrac": divide((clipped * mask).sum(), sums["tokens"]),
            "critic/values_squared_error": divide((error * mask).sum(), sums["tokens"]),
            "critic/returns_squared": divide(returns.square().sum(), sums["tokens"]),
        }
        metrics["critic/values_min"], metrics["critic/values_max"] = masked_extremes(values, mask)
        return loss, {name: value.detach() for name, value in metrics.items()}


def explained_variance(metrics: Mapping[str, float]) -> float:
    """``1 - E[(V - R)^2] / Var[R]`` from the summed metrics of a critic update; 0 when the returns do not vary. It is
    derived after summing because a ratio of variances does not add up over micro-batches."""
    variance = metrics["critic/returns_squared"] - metrics["critic/returns_mean"] ** 2
    return 1.0 - metrics["critic/values_squared_error"] / variance if variance > 1e-12 else 0.0
