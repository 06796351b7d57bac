"""Options read from a configuration tree, and rules between them."""

from __future__ import annotations

import pytest

from refit_transport.rl.assemble import violations
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.settings import (
    GenerationSettings,
    GrpoSettings,
    PpoSettings,
    RewardShaping,
    read,
)


def test_missing_keys_take_their_defaults_also_in_nested_sections() -> None:
    settings = read(PpoSettings, {"ppo_epochs": 2, "reward_shaping": {"overlong_buffer_length": 64}, "other": 1})
    assert settings.ppo_epochs == 2
    assert settings.reward_shaping == RewardShaping(True, 64, 1.0, 14336)
    assert settings.adv_estimator.name == "gae"
    assert read(GrpoSettings, None) == GrpoSettings()


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (1.0, 0.9, 5)), ({"val_temperature": 0.0, "val_top_p": 0.5, "val_top_k": 1}, (0.0, 0.5, 1))],
)
def test_validation_samples_like_training_unless_told_otherwise(options: dict, expected: tuple) -> None:
    sampling = GenerationSettings(top_p=0.9, top_k=5, **options).validation(seed=3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected


def test_all_violations_come_at_once() -> None:
    config = {
        "grpo": {
            "num_prompts_per_step": 0,
            "max_rollout_turns": 3,
            "batch_multiplier": 2,
            "stop_at_validation_metric": "accuracy",
        },
        "loss_fn": {"ratio_clip_c": 0.5},
        "data": {"dataset_name": "jsonl"},
        "env": {"reward": "exact_match"},
    }
    found = violations(config, "grpo")
    keys = ("num_prompts_per_step", "max_rollout_turns", "batch_multiplier", "stop_at_", "ratio_clip_c", "train_path")
    assert len(found) == 6
    assert all(sum(key in line for line in found) == 1 for key in keys)


@pytest.mark.parametrize(
    ("algorithm", "section", "loss", "words"),
    [
        ("grpo", {}, {"use_kl_in_reward": True}, "use_kl_in_reward: got true with adv_estimator.name 'grpo'"),
        ("grpo", {"skip_reference_policy_logprobs_calculation": True}, {}, "set the penalty to 0 or the skip to false"),
        ("ppo", {}, {}, "set the penalty to 0 or the skip to false"),
        ("grpo", {"adv_estimator": {"name": "gae"}}, {}, "needs the values of PPO"),
        ("ppo", {"adv_estimator": {"name": "grpo"}}, {}, "allowed 'gae' or 'raw_reward'"),
    ],
)
def test_options_that_contradict_each_other(algorithm: str, section: dict, loss: dict, words: str) -> None:
    assert any(words in line for line in violations({algorithm: section, "loss_fn": loss}, algorithm))


def test_the_defaults_contradict_nothing() -> None:
    assert violations({}, "grpo") == []
    assert violations({"loss_fn": {"reference_policy_kl_penalty": 0}}, "ppo") == []


@pytest.mark.parametrize(
    ("options", "prev", "reference"),
    [
        ({}, True, True),
        ({"force_on_policy_ratio": True}, False, True),
        ({"reference_policy_kl_penalty": 0}, True, False),
    ],
)
def test_the_loss_says_which_logprobs_it_needs(options: dict, prev: bool, reference: bool) -> None:
    config = LossConfig(**options)
    assert (config.needs_prev_logprobs, config.needs_reference_logprobs) == (prev, reference)
