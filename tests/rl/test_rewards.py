"""Rewards after scaling and shaping, and the filters of samples."""

from __future__ import annotations

import math

import pytest
import torch

from refit_transport.rl.rewards import scale_rewards, shape_rewards
from refit_transport.rl.sample_filters import mask_disagreeing, mask_truncated, sequence_errors
from refit_transport.rl.settings import RewardScaling, RewardShaping


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (RewardScaling(False, 0, 1, -1, 1), [-0.5, 0.0, 0.25, 2.0]),
        (RewardScaling(True, 0, 1, -1, 1), [-1.0, -1.0, -0.5, 1.0]),
        (RewardScaling(True, -1, 3, 0, 8), [1.0, 2.0, 2.5, 6.0]),
    ],
)
def test_scaling_clamps_to_the_source_and_maps_to_the_target(scaling: RewardScaling, expected: list[float]) -> None:
    assert scale_rewards(torch.tensor([-0.5, 0.0, 0.25, 2.0]), scaling).tolist() == pytest.approx(expected)


def test_scaling_refuses_an_empty_source_range() -> None:
    with pytest.raises(ValueError, match=r"source_min 1\.0 must lie below source_max 1\.0"):
        scale_rewards(torch.ones(1), RewardScaling(True, 1.0, 1.0, 0, 1))


LENGTHS = torch.tensor([50, 60, 80, 100, 120])
TRUNCATED = torch.tensor([False, False, False, True, True])


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (RewardShaping(False, 40, 1.0, 100), [1, 1, 1, 1, 1]),
        # Linear from 60 tokens on, and not capped beyond 100.
        (RewardShaping(True, 40, 1.0, 100), [1, 1, 0.5, 0, -0.5]),
        (RewardShaping(True, 40, 0.5, 100), [1, 1, 0.75, 0.5, 0.25]),
        (RewardShaping(True, 40, 1.0, 100, 0.25), [1, 1, 1, 0.25, 0.25]),
        (RewardShaping(True, 40, 1.0, None, 0.0), [1, 1, 1, 0, 0]),
    ],
)
def test_shaping_penalises_length(shaping: RewardShaping, expected: list[float]) -> None:
    assert shape_rewards(torch.ones(5), LENGTHS, TRUNCATED, shaping).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "shaping", [RewardShaping(True, 0, 1.0, 100), RewardShaping(True, 40), RewardShaping(True, 40, 1.0, 100, 1.5)]
)
def test_shaping_refuses_options_out_of_range(shaping: RewardShaping) -> None:
    with pytest.raises(ValueError, match="reward_shaping"):
        shape_rewards(torch.ones(5), LENGTHS, TRUNCATED, shaping)


def disagreeing_batch() -> dict[str, torch.Tensor]:
    """Errors of the rows: exp(0), exp(0.5), NaN, nothing generated."""
    generation = torch.full((4, 3), -1.0)
    previous = generation.clone()
    previous[1] -= 0.5
    previous[2, 1] = math.nan
    previous[:, 0] = 99.0
    mask = torch.tensor([[0.0, 1, 1]] * 3 + [[0, 0, 0]])
    return {
        "token_mask": mask,
        "sample_mask": torch.ones(4),
        "generation_logprobs": generation,
        "prev_logprobs": previous,
        "rewards": torch.tensor([0.0, 1.0, 0.0, 1.0]),
    }


def test_sequence_error_is_the_mean_over_generated_tokens() -> None:
    errors = sequence_errors(disagreeing_batch())
    assert errors[:2].tolist() == pytest.approx([1.0, math.exp(0.5)])
    assert math.isnan(errors[2])
    assert errors[3] == 1.0


def test_disagreeing_and_undefined_sequences_are_masked() -> None:
    batch = disagreeing_batch()
    metrics = mask_disagreeing(batch, 1.5)
    assert batch["sample_mask"].tolist() == [1, 0, 0, 1]
    assert metrics["num_masked_seqs_by_logprob_error"] == 2
    assert metrics["masked_correct_pct"] == 0.5
    assert metrics["max_seq_mult_prob_error_after_mask"] == 1.0


def test_without_a_threshold_errors_are_only_measured() -> None:
    batch = disagreeing_batch()
    batch["prev_logprobs"][2, 1] = -1.0
    metrics = mask_disagreeing(batch, None)
    assert batch["sample_mask"].tolist() == [1, 1, 1, 1]
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(math.exp(0.5))
    assert metrics["num_masked_seqs_by_logprob_error"] == 0


def test_overlong_filtering_counts_only_what_it_drops() -> None:
    batch = {"sample_mask": torch.tensor([1.0, 0.0, 1.0])}
    assert mask_truncated(batch, torch.tensor([True, True, False])) == 1
    assert batch["sample_mask"].tolist() == [0, 0, 1]
