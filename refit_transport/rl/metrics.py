"""How each metric of a training step is summed over micro-batches, data-parallel ranks and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch

MetricValue = torch.Tensor | float


class Normalizer(Enum):
    """What a metric's contributions were divided by. Sums over micro-batches and ranks are then exact."""

    TOKENS = "tokens"
    """Divided by the valid tokens of the global batch."""
    SEQUENCES = "sequences"
    """Divided by the valid sequences of the global batch."""
    POSITIVE_TOKENS = "positive_tokens"
    """Divided by the valid tokens of the global batch that belong to samples with a reward above zero."""
    COUNT = "count"
    """A plain count: added up, also over the optimizer steps of one training step."""
    MINIMUM = "minimum"
    MAXIMUM = "maximum"


NORMALIZERS: dict[str, Normalizer] = {
    "probs_ratio": Normalizer.TOKENS,
    "probs_ratio_clamped": Normalizer.TOKENS,
    "probs_ratio_min": Normalizer.MINIMUM,
    "probs_ratio_max": Normalizer.MAXIMUM,
    "probs_ratio_clamped_min": Normalizer.MINIMUM,
    "probs_ratio_clamped_max": Normalizer.MAXIMUM,
    "token_mult_prob_error": Normalizer.TOKENS,
    "gen_kl_error": Normalizer.TOKENS,
    "policy_kl_error": Normalizer.TOKENS,
    "js_divergence_error": Normalizer.TOKENS,
    "approx_entropy": Normalizer.TOKENS,
    "positive_nll_loss": Normalizer.POSITIVE_TOKENS,
    "num_valid_samples": Normalizer.COUNT,
    "critic/loss": Normalizer.TOKENS,
    "critic/values_mean": Normalizer.TOKENS,
    "critic/values_min": Normalizer.MINIMUM,
    "critic/values_max": Normalizer.MAXIMUM,
    "critic/returns_mean": Normalizer.TOKENS,
    "critic/clipfrac": Normalizer.TOKENS,
    "critic/values_squared_error": Normalizer.TOKENS,
    "critic/returns_squared": Normalizer.TOKENS,
}
"""Metrics not listed here (``loss``, ``kl_penalty``, ``sampling_importance_ratio``, ``is_oob_ratio``) are divided by
tokens or by sequences, as the loss's configuration says; both are added over micro-batches and ranks."""


def _fold(name: str, values: Sequence[MetricValue]) -> MetricValue:
    normalizer = NORMALIZERS.get(name, Normalizer.TOKENS)
    if normalizer is Normalizer.MINIMUM:
        return min(values)
    if normalizer is Normalizer.MAXIMUM:
        return max(values)
    return sum(values)


def _by_name(parts: Iterable[Mapping[str, MetricValue]]) -> dict[str, list[MetricValue]]:
    gathered: dict[str, list[MetricValue]] = {}
    for part in parts:
        for name, value in part.items():
            gathered.setdefault(name, []).append(value)
    return gathered


def combine_parts(parts: Iterable[Mapping[str, MetricValue]]) -> dict[str, float]:
    """Metrics of one optimizer step from those of its micro-batches, over all data-parallel ranks. The inputs are
    already divided by the normalizers of the global batch, so they are added (or the extreme is taken)."""
    return {name: float(_fold(name, values)) for name, values in _by_name(parts).items()}


def average_updates(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of one training step from those of its optimizer steps: means, sums of counts, extremes of extremes."""
    averaged = {}
    for name, values in _by_name(updates).items():
        normalizer = NORMALIZERS.get(name, Normalizer.TOKENS)
        folded = _fold(name, values)
        extreme_or_count = normalizer in (Normalizer.COUNT, Normalizer.MINIMUM, Normalizer.MAXIMUM)
        averaged[name] = float(folded if extreme_or_count else folded / len(values))
    return averaged


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The same metrics with non-finite values as None, which JSON can say."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
