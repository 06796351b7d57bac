"""The policy loss once more, one token at a time in plain Python: slow and obviously right."""

from __future__ import annotations

import math
from collections.abc import Callable

from refit_transport.rl.batch import Batch
from refit_transport.rl.loss_config import LossConfig


def _clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def kl(current: float, reference: float, config: LossConfig) -> float:
    x = _clamp(current - reference, -config.kl_input_clamp_value, config.kl_input_clamp_value)
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[config.reference_policy_kl_type]
    return _clamp(value, -config.kl_output_clamp_value, config.kl_output_clamp_value)


def weight(token: float, tokens: list[float], config: LossConfig) -> float:
    """Importance weight of a token with log-ratio ``token`` in a sequence with log-ratios ``tokens``."""
    raw = _exp(sum(tokens)) if config.sequence_level_importance_ratios else _exp(token)
    if not math.isfinite(raw):
        return 0.0
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio
    match config.truncated_importance_sampling_type:
        case "tis":
            return _clamp(raw, low, high)
        case "icepop":
            return raw if low <= raw <= high else 0.0
        case "seq-mask-tis":
            return raw if low <= _exp(sum(tokens) / len(tokens)) <= high else 0.0
    return raw


def surrogate(current: float, previous: float, ratios: list[float], advantage: float, config: LossConfig) -> float:
    """Loss of one token; ``ratios`` are the log-ratios of its sequence."""
    if config.disable_ppo_ratio:
        return -advantage * current
    log_ratio = sum(ratios) / len(ratios) if config.sequence_level_importance_ratios else current - previous
    ratio = math.exp(log_ratio)
    if config.force_on_policy_ratio:
        return -advantage * 1.0
    clipped = _clamp(ratio, 1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    if config.use_cispo:
        return -advantage * clipped * current
    loss = max(-advantage * ratio, -advantage * clipped)
    if config.ratio_clip_c is not None and advantage < 0:
        loss = min(loss, -advantage * config.ratio_clip_c)
    return loss


def policy_loss(logprobs: list[list[float]], batch: Batch, config: LossConfig) -> float:
    """Loss of a whole global batch."""
    rows = {name: tensor.tolist() for name, tensor in batch.items()}
    per_sequence: list[list[float]] = []
    nll: list[float] = []
    for b, row in enumerate(logprobs):
        if not rows["sample_mask"][b]:
            continue
        tokens = [t for t in range(1, len(row)) if rows["token_mask"][b][t]]
        previous = row if config.force_on_policy_ratio else rows["prev_logprobs"][b]
        off_policy = [previous[t] - rows["generation_logprobs"][b][t] for t in tokens]
        ratios = [row[t] - previous[t] for t in tokens]
        losses = []
        for t, token_off_policy in zip(tokens, off_policy, strict=True):
            loss = surrogate(row[t], previous[t], ratios, rows["advantages"][b][t], config)
            if config.use_importance_sampling_correction:
                loss *= weight(token_off_policy, off_policy, config)
            if config.loss_kl_penalty:
                factor = 1.0
                if config.use_on_policy_kl_approximation:
                    factor = math.exp(row[t] - rows["generation_logprobs"][b][t])
                reference = rows["reference_policy_logprobs"][b][t]
                loss += config.loss_kl_penalty * factor * kl(row[t], reference, config)
            losses.append(loss)
            if rows["rewards"][b] > 0:
                nll.append(-row[t])
        per_sequence.append(losses)
    total = _mean([loss for losses in per_sequence for loss in losses])
    if not config.token_level_loss:
        total = _mean([_mean(losses) for losses in per_sequence])
    return total + config.positive_example_nll_weight * _mean(nll)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def gradient(function: Callable[[list[list[float]]], float], at: list[list[float]], b: int, t: int) -> float:
    """Central difference of ``function`` at one entry of its argument."""
    step = 1e-5
    moved = [[list(row) for row in at] for _ in range(2)]
    moved[0][b][t] += step
    moved[1][b][t] -= step
    return (function(moved[0]) - function(moved[1])) / (2 * step)
