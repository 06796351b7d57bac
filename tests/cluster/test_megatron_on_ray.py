"""Megatron layouts train on Ray, two steps each: every byte a refit leaves in the engines is what the trainers hold."""

import pytest

from refit_transport.cluster.run import run_grpo, run_ppo
from refit_transport.config import load_valid

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

DENSE, CRITIC = "grpo-reverse-digits-1n4r-megatron-tp2-tp2", "ppo-reverse-digits-1n4r-fsdp2-tp2"
MEGATRON = "policy.megatron_cfg"
EXPERTS = ["policy.model_name=tiny/qwen3-moe", "cluster.gpus_per_node=6", f"{MEGATRON}.sequence_parallel=true"]
CASES = {
    "pp2 vpp2": (
        DENSE,
        [
            f"{MEGATRON}.tensor_model_parallel_size=1",
            f"{MEGATRON}.pipeline_model_parallel_size=2",
            f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
        ],
    ),
    "tp2 with sequence parallelism, pp2, ep2": (
        DENSE,
        [
            *EXPERTS,
            f"{MEGATRON}.pipeline_model_parallel_size=2",
            f"{MEGATRON}.expert_model_parallel_size=2",
        ],
    ),
    "tp2 with sequence parallelism, dp2, ep2, etp2; expert-parallel engine": (
        DENSE,
        [
            *EXPERTS,
            f"{MEGATRON}.expert_model_parallel_size=2",
            f"{MEGATRON}.expert_tensor_parallel_size=2",
            "policy.generation.vllm_cfg.expert_parallel_size=2",
        ],
    ),
    "pp2 with a critic over both ranks": (
        CRITIC,
        [
            "policy.make_sequence_length_divisible_by=1",
            "policy.dtensor_cfg.enabled=false",
            f"{MEGATRON}.enabled=true",
            f"{MEGATRON}.pipeline_model_parallel_size=2",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_trains_with(name, tmp_path):
    recipe, overrides = CASES[name]
    algorithm = recipe.partition("-")[0]
    common = [
        f"logger.log_dir={tmp_path}",
        f"{algorithm}.max_num_steps=2",
        "checkpointing.enabled=false",
        "policy.generation.refit_cfg.nccl_reshard.verify=checksum",
    ]
    config = load_valid(f"recipes/{recipe}.yaml", [*common, *overrides], algorithm=algorithm)
    summary = (run_ppo if algorithm == "ppo" else run_grpo)(config)
    assert (summary.steps, summary.refits) == (2, 2)
    assert summary.token_mult_prob_error_max < 1.01
    assert summary.bytes_reshard > 0
