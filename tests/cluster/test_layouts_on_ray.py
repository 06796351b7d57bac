"""Recipes of other layouts, two steps each on Ray: engines must compute the trainer's probabilities after a refit."""

import pytest
from omegaconf import OmegaConf

from refit_transport.cluster.run import run_grpo, run_ppo
from refit_transport.config import load_valid

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FSDP, MOE = "grpo-reverse-digits-1n4r-fsdp2-tp2", "grpo-reverse-digits-moe-1n4r-fsdp2-tp2"
VLLM = "policy.generation.vllm_cfg"
CASES = {
    "pipeline-parallel engine, all tensors shard to shard": (
        FSDP,
        [
            f"{VLLM}.tensor_parallel_size=1",
            f"{VLLM}.pipeline_parallel_size=2",
            "policy.generation.refit_cfg.nccl_reshard.scope=all",
        ],
    ),
    "expert-parallel engine": (MOE, [f"{VLLM}.expert_parallel_size=2"]),
    "two engines": ("grpo-reverse-digits-1n4r-fsdp2-tp1x2", []),
    "gather and broadcast over gloo": (
        "grpo-reverse-digits-1n4r-fsdp2-tp2-broadcast",
        ["policy.generation.refit_cfg.gather_broadcast.wire=gloo"],
    ),
    "tensor-parallel trainer": (FSDP, ["policy.dtensor_cfg.tensor_parallel_size=2"]),
    "Megatron trainer": ("grpo-reverse-digits-1n4r-megatron-tp2-tp2", []),
    "ahead of the trainer, every byte verified": (
        FSDP,
        [
            "grpo.async_grpo.enabled=true",
            "loss_fn.use_importance_sampling_correction=true",
            "policy.generation.refit_cfg.nccl_reshard.verify=checksum",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_grpo_trains_with(name, tmp_path):
    recipe, overrides = CASES[name]
    summary = run_grpo(configured(recipe, "grpo", tmp_path, overrides))
    assert (summary.steps, summary.refits) == (2, 2)
    ahead = any("async" in override for override in overrides)
    assert summary.token_mult_prob_error_max < (2.0 if ahead else 1.05)
    moved = summary.bytes_reshard if "broadcast" not in recipe else summary.bytes_broadcast
    assert moved > 0


def test_ppo_trains_policy_and_critic(tmp_path):
    summary = run_ppo(configured("ppo-reverse-digits-1n4r-fsdp2-tp2", "ppo", tmp_path, []))
    assert (summary.steps, summary.refits) == (2, 2)
    assert summary.token_mult_prob_error_max < 1.05


def configured(recipe, algorithm, folder, overrides):
    common = [f"logger.log_dir={folder}", f"{algorithm}.max_num_steps=2", "checkpointing.enabled=false"]
    config = load_valid(f"recipes/{recipe}.yaml", [*common, *overrides], algorithm=algorithm)
    assert OmegaConf.select(config, f"{algorithm}.max_num_steps") == 2
    return config
