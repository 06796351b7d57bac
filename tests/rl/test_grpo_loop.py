"""The order of a GRPO run, what it refuses, and that a resumed run continues where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from refit_transport.rl.data import Dataloader
from refit_transport.rl.tasks.reverse_digits import examples
from tests.rl.stand_ins import TOKENIZER, scripted_loop

STEP = [
    "wake",
    "generate 16",
    "sleep",
    "policy.prepare_for_logprobs",
    "policy.logprobs",
    "policy.prepare_for_training",
    "policy.train",
    "policy.finish_training",
]


def test_each_step_refits_generates_and_trains_in_this_order(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path)
    result = loop.run()
    assert made.trace.calls == ["refit 1", "reported refit", *STEP, "refit 2", "reported refit", *STEP]
    assert (result.steps, result.weight_version, result.stopped_by) == (2, 3, "max_num_steps")


def test_validation_refits_first_and_the_next_step_does_not_again(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, val_period=1, max_val_samples=8, val_at_start=True)
    loop.run()
    validation = ["wake", "generate 8", "sleep"]
    expected = ["refit 1", "reported refit", *validation, *STEP, "refit 2", "reported refit", *validation, *STEP]
    assert made.trace.calls == [*expected, "refit 3", "reported refit", *validation]
    assert [step for step, _ in made.trace.steps] == [0, 1, 2]


def test_reference_logprobs_are_computed_only_for_a_kl_penalty(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, loss={"reference_policy_kl_penalty": 0.1})
    loop.run()
    assert made.trace.calls.count("policy.reference_logprobs") == 2
    assert made.trace.steps[-1][1]["train/kl_penalty"] == 0


def test_forced_on_policy_ratio_skips_the_logprob_pass(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, loss={"force_on_policy_ratio": True})
    loop.run()
    assert "policy.logprobs" not in made.trace.calls


def test_an_engine_left_behind_by_a_refit_stops_the_run(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path)
    made.engines.arrives = False
    with pytest.raises(RuntimeError, match=r"trainer is at version 1.*serve \[1, 0\]"):
        loop.run()
    assert not any(call.startswith("generate") for call in made.trace.calls)


def test_a_completion_from_other_weights_stops_the_run(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path)
    made.engines.generates_with = 7
    with pytest.raises(RuntimeError, match="completion 0 was made with weight versions"):
        loop.run()


def test_the_batch_trains_on_generated_tokens_with_group_advantages(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, max_num_steps=1, normalize_rewards=False)
    loop.run()
    batch = made.trace.batches[0]
    assert batch["token_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]] * 16
    assert batch["rewards"].tolist() == [0, 1] * 8
    expected = torch.tensor([-2 / 3, 2 / 3] * 8)[:, None] * batch["token_mask"]
    torch.testing.assert_close(batch["advantages"], expected)
    texts = TOKENIZER.batch_decode(batch["input_ids"].tolist())
    assert texts[1].endswith(f"{texts[1][:3][::-1]}<eos>")


def test_metrics_and_timings_have_the_names_users_know(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, offset=0.01)
    loop.run()
    metrics = made.trace.steps[-1][1]
    names = (
        "loss grad_norm reward mean_prompt_length total_num_tokens advantages/mean advantages/max advantages/min "
        "probs_ratio probs_ratio_clamped probs_ratio_min probs_ratio_max probs_ratio_clamped_min "
        "probs_ratio_clamped_max kl_penalty token_mult_prob_error gen_kl_error policy_kl_error js_divergence_error "
        "sampling_importance_ratio approx_entropy num_valid_samples is_oob_ratio positive_nll_loss"
    )
    timings = (
        "total_step_time data_processing prepare_for_generation/total "
        "prepare_for_generation/transfer_and_update_weights generation reward_calculation logprob_inference_prep "
        "policy_and_reference_logprobs advantage_calculation training_prep policy_training"
    )
    wanted = {f"train/{name}" for name in names.split()} | {f"timing/train/{name}" for name in timings.split()}
    assert wanted <= set(metrics)
    assert metrics["train/token_mult_prob_error"] == pytest.approx(1.01005, abs=1e-5)
    assert metrics["train/max_seq_mult_prob_error"] == pytest.approx(1.01005, abs=1e-5)
    assert metrics["train/reward"] == 0.5


def test_every_sample_of_a_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, max_num_steps=3)
    loop.run()
    starts = [sampling.seed for sampling in made.trace.samplings]
    drawn = {start + offset for start in starts for offset in range(16)}
    assert len(drawn) == 48


def test_sequences_that_engine_and_trainer_disagree_about_do_not_train(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, offset=0.2, seq_logprob_error_threshold=1.1, max_num_steps=1)
    loop.run()
    metrics = made.trace.steps[0][1]
    assert metrics["train/num_masked_seqs_by_logprob_error"] == 16
    assert metrics["train/masked_correct_pct"] == 0.5
    assert metrics["train/num_valid_samples"] == 0
    assert metrics["train/loss"] == 0


def test_truncated_samples_do_not_train_with_overlong_filtering(tmp_path: Path) -> None:
    loop, made = scripted_loop(
        tmp_path,
        answer=lambda prompt, index: "123." if index % 4 == 0 else prompt[:-1][::-1],
        overlong_filtering=True,
        max_num_steps=1,
    )
    loop.run()
    assert made.trace.batches[0]["sample_mask"].tolist() == [0, 1, 1, 1] * 4
    assert made.trace.steps[0][1]["train/num_overlong_filtered"] == 4
    assert made.trace.steps[0][1]["train/truncation_rate"] == 0.25


def solves_only_small_numbers(prompt: str, index: int) -> str:
    """Rewards differ within a group only where the first digit is below 5."""
    return prompt[:-1][::-1] if prompt[0] < "5" and index % 2 else "xxx"


def test_dynamic_sampling_fills_the_step_with_prompts_that_teach(tmp_path: Path) -> None:
    loop, made = scripted_loop(
        tmp_path, answer=solves_only_small_numbers, use_dynamic_sampling=True, batch_multiplier=1.5
    )
    loop.run()
    for batch in made.trace.batches:
        assert batch["rewards"].reshape(4, 4).sum(1).tolist() == [2, 2, 2, 2]
    metrics = made.trace.steps[0][1]
    assert 0 < metrics["train/dynamic_sampling_kept_fraction"] < 1
    generated = sum(int(call.split()[1]) for call in made.trace.calls if call.startswith("generate"))
    assert loop.collector.consumed_samples == generated / 4


def test_dynamic_sampling_gives_up_when_nothing_teaches(tmp_path: Path) -> None:
    loop, _ = scripted_loop(
        tmp_path, answer=lambda prompt, index: "xxx", use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=3
    )
    with pytest.raises(RuntimeError, match=r"0 of 4 prompts .* after 3 generation batches"):
        loop.run()


def test_validation_can_end_the_run_and_counts_pass_at_k(tmp_path: Path) -> None:
    loop, made = scripted_loop(
        tmp_path,
        max_num_steps=9,
        val_period=2,
        max_val_samples=6,
        val_batch_size=4,
        val_num_generations_per_prompt=2,
        stop_at_validation_metric="val:pass@2",
        stop_at_validation_threshold=1.0,
        logger={"num_val_samples_to_print": 3},
    )
    result = loop.run()
    assert (result.steps, result.stopped_by) == (2, "validation")
    metrics = made.trace.steps[-1][1]
    assert (metrics["validation/accuracy"], metrics["validation/pass@2"]) == (0.5, 1.0)
    assert len(made.trace.printed[0]) == 3


def test_the_last_step_validates_when_asked(tmp_path: Path) -> None:
    loop, made = scripted_loop(tmp_path, val_at_end=True, max_val_samples=2)
    loop.run()
    assert ["validation/accuracy" in metrics for _, metrics in made.trace.steps] == [False, True]


def test_the_run_ends_with_the_data(tmp_path: Path) -> None:
    loop, _ = scripted_loop(tmp_path, max_num_steps=50, max_num_epochs=2)
    loop.collector.dataloader = Dataloader(examples(8, seed=0), seed=0)
    assert loop.total_steps == 4
    assert loop.run().stopped_by == "max_num_epochs"
    assert loop.step == 4


SAVE = {"enabled": True, "save_period": 2}


def prompts_by_step(trace: object) -> list[list[str]]:
    return [[row["prompt"] for row in rows] for rows in trace.rows]


def test_a_resumed_run_repeats_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, whole_made = scripted_loop(tmp_path / "whole", max_num_steps=5)
    whole.run()
    first, _ = scripted_loop(tmp_path / "parts", max_num_steps=3, checkpointing=SAVE)
    first.run()
    second, second_made = scripted_loop(tmp_path / "parts", max_num_steps=5, checkpointing=SAVE)
    result = second.run()
    assert prompts_by_step(second_made.trace) == prompts_by_step(whole_made.trace)[3:]
    assert [s.seed for s in second_made.trace.samplings] == [s.seed for s in whole_made.trace.samplings][3:]
    assert second_made.trace.calls[0] == "refit 4"
    assert (result.steps, result.weight_version) == (5, 6)
    assert second.collector.consumed_samples == whole.collector.consumed_samples == 20


def test_a_run_can_start_from_another_runs_checkpoint(tmp_path: Path) -> None:
    scripted_loop(tmp_path / "a", checkpointing=SAVE)[0].run()
    resume = {"enabled": False, "resume_from": str(tmp_path / "a" / "checkpoints")}
    loop, made = scripted_loop(tmp_path / "b", max_num_steps=3, checkpointing=resume)
    loop.run()
    assert [step for step, _ in made.trace.steps] == [3]


def test_resuming_with_another_data_set_is_refused(tmp_path: Path) -> None:
    scripted_loop(tmp_path, checkpointing=SAVE)[0].run()
    loop, _ = scripted_loop(tmp_path, max_num_steps=3, checkpointing=SAVE)
    loop.collector.dataloader = Dataloader(examples(8, seed=0), seed=0)
    with pytest.raises(ValueError, match="the data set has 8 examples, the checkpoint was written with 8192"):
        loop.run()


def test_a_metric_that_is_not_finite_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = scripted_loop(tmp_path, offset=float("nan"), max_num_steps=1)
    loop.run()
    assert "step 1: metrics that are not finite: " in caplog.text
    assert "train/token_mult_prob_error" in caplog.text
