"""The clipped policy-gradient loss of GRPO and PPO, normalised over the global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from refit_transport.rl.batch import Batch, loss_mask
from refit_transport.rl.divergence import js_estimate, kl_estimate, mult_prob_error
from refit_transport.rl.importance import ImportanceWeights, importance_weights, mean_over_tokens
from refit_transport.rl.loss_config import LossConfig

Metrics = dict[str, torch.Tensor]
Ratios = tuple[torch.Tensor, torch.Tensor]


def divide(total: torch.Tensor, by: float) -> torch.Tensor:
    """``total / by``, and zero (with a gradient of zero) when there is nothing to divide by."""
    return total / by if by > 0 else total * 0.0


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` with zeros where ``mask`` is zero, also over NaN and inf."""
    return torch.where(mask > 0, values, 0.0)


def masked_extremes(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest counted value; (inf, -inf) when none is counted."""
    values = values.detach()
    low = torch.where(mask > 0, values, torch.inf).amin()
    return low, torch.where(mask > 0, values, -torch.inf).amax()


class ClippedPolicyLoss:
    """Clipped surrogate with KL penalty, as ``loss_fn.*`` says. Instances can be pickled to other processes.

    ``loss(logprobs, batch, sums)`` returns this micro-batch's contribution: adding the losses (and the metrics, see
    ``rl/metrics.py``) over all micro-batches and data-parallel ranks gives those of the global batch. Where gradients
    are averaged over ranks, as FSDP does, the caller multiplies the loss by their number."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def __call__(self, logprobs: torch.Tensor, batch: Batch, sums: Mapping[str, float]) -> tuple[torch.Tensor, Metrics]:
        """``logprobs`` [B, S] are the current policy's, with gradient, aligned with ``input_ids``; ``sums`` are the
        ``batch_sums`` of the global batch. Returns the loss (a scalar) and detached scalar metrics."""
        mask = loss_mask(batch)
        current = masked(logprobs.float(), mask)
        generation = masked(batch["generation_logprobs"], mask)
        previous = current.detach()
        if self.config.needs_prev_logprobs:
            previous = masked(batch["prev_logprobs"], mask)
        weights = importance_weights(previous - generation, mask, self.config)
        ratios = self._ratios(current, previous, mask)
        surrogate = self._surrogate(current, masked(batch["advantages"], mask), ratios)
        if self.config.use_importance_sampling_correction:
            surrogate = surrogate * weights.weights
        loss = self._reduce(surrogate, mask, batch, sums)
        kl, loss = self._add_kl(loss, current, generation, mask, batch, sums)
        nll, loss = self._add_positive_nll(loss, current, mask, batch, sums)
        metrics = {"loss": loss, "kl_penalty": kl, "positive_nll_loss": nll}
        metrics |= self._ratio_metrics(ratios, mask, sums)
        metrics |= self._agreement_metrics(current, previous, generation, mask, sums)
        metrics |= self._weight_metrics(weights, mask, batch, sums)
        metrics["num_valid_samples"] = batch["sample_mask"].sum()
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _ratios(self, current: torch.Tensor, previous: torch.Tensor, mask: torch.Tensor) -> Ratios:
        """Probability ratio and its clipped value, [B, S]."""
        if self.config.disable_ppo_ratio:
            return current, current
        log_ratio = current - previous
        if self.config.sequence_level_importance_ratios:
            log_ratio = mean_over_tokens(log_ratio, mask).expand_as(current)
        ratio = log_ratio.exp()
        if self.config.force_on_policy_ratio:
            return ratio, ratio
        return ratio, ratio.clamp(1 - self.config.ratio_clip_min, 1 + self.config.ratio_clip_max)

    def _surrogate(self, current: torch.Tensor, advantages: torch.Tensor, ratios: Ratios) -> torch.Tensor:
        ratio, clipped = ratios
        if self.config.use_cispo:
            return -advantages * clipped.detach() * current
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if self.config.ratio_clip_c is not None:
            bound = -advantages * self.config.ratio_clip_c
            loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        return loss

    def _reduce(
        self, values: torch.Tensor, mask: torch.Tensor, batch: Batch, sums: Mapping[str, float]
    ) -> torch.Tensor:
        """Mean over the global batch's tokens, or over its sequences' means."""
        if self.config.token_level_loss:
            return divide(masked(values, mask).sum(), sums["tokens"])
        return divide((mean_over_tokens(values, mask)[:, 0] * batch["sample_mask"]).sum(), sums["sequences"])

    def _add_kl(
        self,
        loss: torch.Tensor,
        current: torch.Tensor,
        generation: torch.Tensor,
        mask: torch.Tensor,
        batch: Batch,
        sums: Mapping[str, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        penalty = self.config.loss_kl_penalty
        if not penalty:
            return loss.new_zeros(()), loss
        config = self.config
        reference = masked(batch["reference_policy_logprobs"], mask)
        estimate = kl_estimate(
            current,
            reference,
            config.reference_policy_kl_type,
            config.kl_input_clamp_value,
            config.kl_output_clamp_value,
        )
        # The tokens were sampled from some policy, so the expectation's gradient has a score-function term besides the
        # estimate's own: a factor of value 1 (or the ratio to the sampling policy) carries it.
        base = generation if config.use_on_policy_kl_approximation else current.detach()
        factor = (current - base).exp()
        kl = self._reduce(torch.where(torch.isfinite(factor), factor, 0.0) * estimate, mask, batch, sums)
        return kl, loss + penalty * kl

    def _add_positive_nll(
        self,
        loss: torch.Tensor,
        current: torch.Tensor,
        mask: torch.Tensor,
        batch: Batch,
        sums: Mapping[str, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.config.positive_example_nll_weight
        if not weight:
            return loss.new_zeros(()), loss
        positive = (batch["rewards"] > 0).float().unsqueeze(-1)
        nll = divide((-current * mask * positive).sum(), sums["positive_tokens"])
        return nll, loss + weight * nll

    def _ratio_metrics(self, ratios: Ratios, mask: torch.Tensor, sums: Mapping[str, float]) -> Metrics:
        metrics = {}
        for name, ratio in zip(("probs_ratio", "probs_ratio_clamped"), ratios, strict=True):
            metrics[name] = divide(masked(ratio, mask).sum(), sums["tokens"])
            metrics[f"{name}_min"], metrics[f"{name}_max"] = masked_extremes(ratio, mask)
        return metrics

    @torch.no_grad()
    def _agreement_metrics(
        self,
        current: torch.Tensor,
        previous: torch.Tensor,
        generation: torch.Tensor,
        mask: torch.Tensor,
        sums: Mapping[str, float],
    ) -> Metrics:
        """How well engine and trainer agree on the sampled tokens, and how sure the policy is."""
        per_token = {
            "token_mult_prob_error": mult_prob_error(generation, previous),
            "gen_kl_error": kl_estimate(generation, previous),
            "policy_kl_error": kl_estimate(previous, generation),
            "js_divergence_error": js_estimate(previous, generation),
            "approx_entropy": -(current - generation).exp() * current,
        }
        return {name: divide(masked(values, mask).sum(), sums["tokens"]) for name, values in per_token.items()}

    def _weight_metrics(
        self, weights: ImportanceWeights, mask: torch.Tensor, batch: Batch, sums: Mapping[str, float]
    ) -> Metrics:
        named = {"sampling_importance_ratio": weights.weights, "is_oob_ratio": weights.out_of_bounds}
        metrics = {}
        for name, values in named.items():
            if values.shape[-1] == mask.shape[-1]:
                metrics[name] = divide(masked(values, mask).sum(), sums["tokens"])
            else:
                metrics[name] = divide((values[:, 0] * batch["sample_mask"]).sum(), sums["sequences"])
        return metrics
