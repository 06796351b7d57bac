"""The order of a PPO run, and its critic warm-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.rl.stand_ins import scripted_loop

GENERATE = ["wake", "generate 16", "sleep"]
INFER = [
    "policy.finish_training",
    "value.prepare_for_inference",
    "value.values",
    "value.finish",
    "policy.prepare_for_logprobs",
    "policy.logprobs",
    "policy.finish_training",
]
CRITIC = ["value.prepare_for_training", "value.train", "value.finish"]
POLICY = ["policy.prepare_for_training", "policy.train", "policy.finish_training"]


def test_each_epoch_trains_the_critic_before_the_policy(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, "ppo", ppo_epochs=2, max_num_steps=1)
    loop.run()
    assert made.trace.calls == ["refit 1", "reported refit", *GENERATE, *INFER, *(CRITIC + POLICY) * 2]


def test_warm_up_trains_the_critic_alone_and_does_not_refit(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, "ppo", ppo_epochs=1, max_num_steps=3, policy_training_start_step=2)
    result = loop.run()
    warm = [*GENERATE, *INFER, *CRITIC]
    assert made.trace.calls == ["refit 1", "reported refit", *warm * 3, *POLICY]
    assert result.weight_version == 2
    assert "train/loss" not in made.trace.steps[1][1]
    assert {"train/loss", "train/critic/loss", "train/critic/grad_norm"} <= set(made.trace.steps[2][1])


def test_returns_of_a_zero_critic_are_the_rewards_to_go(tmp_path: Path) -> None:
    loop, made = scripted_loop(
        tmp_path, "ppo", ppo_epochs=1, max_num_steps=1, adv_estimator={"name": "gae", "gae_lambda": 1.0}
    )
    loop.run()
    batch = made.trace.batches[0]
    torch.testing.assert_close(batch["returns"], batch["rewards"][:, None] * batch["token_mask"])
    assert batch["advantages"][batch["token_mask"] > 0].mean() == pytest.approx(0, abs=1e-6)


def test_raw_rewards_need_no_critic(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, "ppo", max_num_steps=1, adv_estimator={"name": "raw_reward"})
    loop.run()
    assert not any(call.startswith("value") for call in made.trace.calls)


def test_policy_and_critic_resume_together_or_not_at_all(tmp_path: Path) -> None:
    saving = {"enabled": True}
    scripted_loop(tmp_path, "ppo", checkpointing=saving)[0].run()
    loop, made = scripted_loop(tmp_path, "ppo", max_num_steps=3, checkpointing=saving)
    loop.run()
    assert made.trace.calls[0] == "refit 3"
    extra = tmp_path / "checkpoints" / "step_3" / "value" / "extra.json"
    extra.write_text(json.dumps({**json.loads(extra.read_text()), "step": 2}))
    with pytest.raises(RuntimeError, match="saved at different states"):
        scripted_loop(tmp_path, "ppo", max_num_steps=4, checkpointing=saving)[0].run()
