"""Trainer layouts on Ray, two steps each: every byte that a refit leaves in the engines is what the trainers hold."""

from importlib.util import find_spec

import pytest

from refit_transport.cluster.run import run_grpo, run_ppo
from refit_transport.config import load_valid

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FSDP, MOE = "grpo-reverse-digits-1n4r-fsdp2-tp2", "grpo-reverse-digits-moe-1n4r-fsdp2-tp2"
MEGATRON_EXPERTS = "grpo-reverse-digits-moe-1n6r-megatron-tp2ep2etp2-ep2"
CRITIC = "ppo-reverse-digits-1n4r-fsdp2-tp2"
DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
CASES = {
    "LoRA": (FSDP, [f"{DTENSOR}.lora_cfg.enabled=true", f"{DTENSOR}.lora_cfg.dim=4"]),
    "tp2 with experts over four ranks": (
        MOE,
        ["cluster.gpus_per_node=6", f"{DTENSOR}.tensor_parallel_size=2", f"{DTENSOR}.expert_parallel_size=4"],
    ),
    "tp2 with a critic cut alike, in two replicas": (
        CRITIC,
        ["cluster.gpus_per_node=6", f"{DTENSOR}.tensor_parallel_size=2", f"{DTENSOR}.dp_replicate_size=2"],
    ),
    "Megatron pp2 vpp2": ("grpo-reverse-digits-1n4r-megatron-pp2vpp2-tp2", []),
    "Megatron tp2 with sequence parallelism, pp2, ep2": (
        MEGATRON_EXPERTS,
        [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.expert_tensor_parallel_size=1"],
    ),
    "Megatron tp2 with sequence parallelism, dp2, ep2, etp2; expert-parallel engine": (MEGATRON_EXPERTS, []),
    "Megatron pp2 with a critic over both ranks": (
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
    if "Megatron" in name and find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install -e '.[megatron]'")
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
