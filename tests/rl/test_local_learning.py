"""Real models in one process: the tiny model, runs that write their reports, and runs that learn."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from refit_transport.report.summary import RunSummary
from refit_transport.rl.local import LocalGeneration, LocalPolicy, LocalRefit, LocalRefitReport, LocalValue
from refit_transport.rl.protocols import SamplingConfig
from refit_transport.rl.run import run
from refit_transport.rl.tasks.tiny_model import STAMP, make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untrained", warm_start_steps=0)


class LosesWeights(LocalRefit):
    """A refit that reports success and writes into storage nobody reads."""

    def refit(self, version: int) -> LocalRefitReport:
        self._generation.version = version
        return LocalRefitReport(version, 1e-3, {"reshard": 0, "broadcast": 0}, {}, "none")


def train(
    folder: Path,
    model_path: Path,
    steps: int,
    algorithm: str = "grpo",
    refit: type[LocalRefit] = LocalRefit,
    prompts: int = 16,
    samples: int = 16,
    planned_steps: int | None = None,
    ahead: bool = False,
) -> RunSummary:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    sizes = {
        "global_batch_size": 64,
        "micro_batch_size": 64,
        "total_steps": planned_steps or steps,
        "warmup_steps": min(10, steps),
    }
    config = {
        algorithm: {
            "num_prompts_per_step": prompts,
            "num_generations_per_prompt": samples,
            "max_num_steps": steps,
            "val_period": 0,
            "val_at_start": False,
            "use_leave_one_out_baseline": False,
            "seed": 0,
            "ppo_epochs": 1,
            "reward_shaping": {"enabled": False},
            "reward_scaling": {"enabled": False},
            "async_grpo": {"enabled": ahead},
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.0,
            "ratio_clip_max": 0.28,
            "use_importance_sampling_correction": ahead,
        },
        "policy": {"generation": {"max_new_tokens": 4}},
        "checkpointing": {"save_period": 4},
        "logger": {"tensorboard_enabled": steps < 20},
    }
    generation = LocalGeneration(model)
    return run(
        config,
        "grpo: {}\n",
        folder,
        LocalPolicy(model, lr=3e-4, **sizes),
        generation,
        refit(model, generation),
        AutoTokenizer.from_pretrained(model_path),
        LocalValue(model, lr=1e-3, **sizes) if algorithm == "ppo" else None,
        Console(file=StringIO()),
    )


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def test_the_tiny_model_is_made_once_and_depends_only_on_its_arguments(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "a", seed=3, warm_start_steps=1)
    stamp = (first / STAMP).stat().st_mtime_ns
    make_tiny_model(tmp_path / "a", seed=3, warm_start_steps=1)
    assert (first / STAMP).stat().st_mtime_ns == stamp
    second = make_tiny_model(tmp_path / "b", seed=3, warm_start_steps=1)
    assert all(torch.equal(value, parameters(second)[name]) for name, value in parameters(first).items())
    make_tiny_model(tmp_path / "a", seed=4, warm_start_steps=1)
    assert (first / STAMP).stat().st_mtime_ns != stamp


@pytest.mark.parametrize(("moe", "low", "high"), [(False, 793_984, 793_984), (True, 2_500_000, 2_700_000)])
def test_the_tiny_models_sizes(tmp_path: Path, moe: bool, low: int, high: int) -> None:
    path = make_tiny_model(tmp_path / "model", warm_start_steps=0, moe=moe)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert low <= sum(parameter.numel() for parameter in model.parameters()) <= high


def test_generated_logprobs_are_the_trainers(untrained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(untrained, dtype=torch.float32)
    prompts = [[4, 5, 6], [7, 8], [9, 4, 5], [6, 7]]
    sampling = SamplingConfig(max_new_tokens=5, temperature=0.7, seed=1)
    completions = LocalGeneration(model).generate(prompts, sampling)
    policy = LocalPolicy(model, temperature=0.7, lr=0.0, global_batch_size=4, micro_batch_size=4, total_steps=1)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logprobs = policy.logprobs({"input_ids": ids})[0, len(prompt) :]
        torch.testing.assert_close(logprobs, torch.tensor(completion.logprobs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_short_run_fills_its_folder(tmp_path: Path, untrained: Path, algorithm: str) -> None:
    summary = train(tmp_path, untrained, 8, algorithm, prompts=4, samples=4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["train/grad_norm"] >= 0 and abs(line["train/loss"]) < 10 for line in lines)
    assert all(1 <= line["train/token_mult_prob_error"] < 1.001 for line in lines)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["steps"], written["refits"], written["weight_version"]) == (8, 8, 9)
    assert written["bytes_broadcast"] == 8 * 4 * (793_984 + 48 * 128)
    assert summary.token_mult_prob_error_max < 1.001
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "refit_time.png",
        "reward.png",
        "token_mult_prob_error.png",
    ]
    assert any((tmp_path / "tensorboard").iterdir())
    assert len(list((tmp_path / "rollouts").iterdir())) == 8
    assert (tmp_path / "config.yaml").read_text() == "grpo: {}\n"
    assert (tmp_path / "checkpoints" / "step_8").is_dir()


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path, untrained: Path) -> None:
    options = {"prompts": 4, "samples": 4, "planned_steps": 8}
    train(tmp_path / "whole", untrained, 8, **options)
    train(tmp_path / "parts", untrained, 5, **options)
    train(tmp_path / "parts", untrained, 8, **options)
    finals = [torch.load(tmp_path / run / "checkpoints/step_8/policy/local.pt") for run in ("whole", "parts")]
    assert all(torch.equal(value, finals[1]["module"][name]) for name, value in finals[0]["module"].items())
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))


@pytest.mark.slow
def test_grpo_learns_to_reverse_digits(tmp_path: Path, tiny: Path) -> None:
    summary = train(tmp_path, tiny, 60, planned_steps=80)
    assert summary.reward_last - summary.reward_first >= 0.4


@pytest.mark.slow
def test_grpo_learns_nothing_when_weights_do_not_arrive(tmp_path: Path, tiny: Path) -> None:
    summary = train(tmp_path, tiny, 30, refit=LosesWeights, planned_steps=80)
    assert abs(summary.reward_last - summary.reward_first) < 0.12
    assert summary.token_mult_prob_error_max > 1.05


@pytest.mark.slow
def test_ppo_learns_to_reverse_digits(tmp_path: Path, tiny: Path) -> None:
    summary = train(tmp_path, tiny, 30, "ppo", prompts=256, samples=1, planned_steps=80)
    assert summary.reward_last - summary.reward_first >= 0.4


@pytest.mark.slow
def test_asynchronous_grpo_learns_from_rollouts_one_version_old(tmp_path: Path, tiny: Path) -> None:
    summary = train(tmp_path, tiny, 50, planned_steps=80, ahead=True)
    assert summary.reward_last - summary.reward_first >= 0.4
    ages = [json.loads(line)["train/avg_trajectory_age"] for line in (tmp_path / "metrics.jsonl").open()]
    assert sum(ages) > 0.9 * len(ages)
