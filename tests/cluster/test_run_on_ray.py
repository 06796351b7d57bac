"""The main job on Ray: two FSDP2 trainer ranks, one vLLM engine of two tensor-parallel ranks, real refits.

One cluster serves all tests of the module, in order: it trains, then resumes.
"""

import json

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from refit_transport.cluster.run import localise, running
from refit_transport.cluster.trainer_group import RemotePolicy
from refit_transport.config import load_config
from refit_transport.rl.batch import pad_sequences
from refit_transport.rl.protocols import SamplingConfig
from refit_transport.rl.run import run

pytestmark = pytest.mark.engine

RECIPE = "recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = load_config(
        RECIPE,
        [
            f"logger.log_dir={folder}",
            "grpo.max_num_steps=4",
            "checkpointing.save_period=2",
            "policy.generation.refit_cfg.nccl_reshard.timeout_s=60",
        ],
    )
    tree = OmegaConf.to_container(config)
    localise(tree)
    return tree


@pytest.fixture(scope="module")
def cluster(tree):
    with running(tree) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grpo")


def train(tree, cluster, folder):
    tokenizer = AutoTokenizer.from_pretrained(tree["policy"]["model_name"])
    policy = RemotePolicy(cluster.trainers)
    return run(tree, OmegaConf.to_yaml(tree), folder, policy, cluster.engines, cluster.refit, tokenizer)


def test_every_step_trains_on_the_weights_that_generated_it(tree, cluster, folder):
    summary = train(tree, cluster, folder)
    assert (summary.steps, summary.refits, summary.weight_version) == (4, 4, 5)
    assert summary.token_mult_prob_error_max < 1.05
    assert summary.bytes_reshard > summary.bytes_broadcast > 0
    assert cluster.engines.weight_versions() == [4]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["train/reward"] <= 1 for line in lines)
    assert all(line["timing/train/prepare_for_generation/transfer_and_update_weights"] > 0 for line in lines)
    for name in ("config.yaml", "summary.json", "tensorboard", "plots"):
        assert (folder / name).exists(), name


def test_the_engine_computes_the_trainers_probabilities(tree, cluster):
    prompts = [[4 + d, 5, 6, 17] for d in range(8)]
    completions = cluster.engines.generate(prompts, SamplingConfig(4, temperature=1.0, seed=3))
    batch = pad_sequences(
        prompts, [c.token_ids for c in completions], [c.logprobs for c in completions], pad_token_id=0
    )
    cluster.refit.refit(9)
    renewed = cluster.engines.generate(prompts, SamplingConfig(4, temperature=1.0, seed=3))
    assert {c.weight_versions for c in renewed} == {(9,)}
    trainer = RemotePolicy(cluster.trainers).logprobs(batch)
    for row, (prompt, completion) in enumerate(zip(prompts, renewed, strict=True)):
        if list(completion.token_ids) == list(completions[row].token_ids):
            own = trainer[row, len(prompt) : len(prompt) + len(completion.token_ids)].tolist()
            assert own == pytest.approx(list(completion.logprobs), abs=1e-3)


def test_a_resumed_run_goes_on_at_its_step_and_brings_the_engine_up_to_it(tree, cluster, folder):
    cluster.refit.connect()
    more = {**tree, "grpo": {**tree["grpo"], "max_num_steps": 6}}
    summary = train(more, cluster, folder)
    assert (summary.steps, summary.weight_version) == (6, 7)
    assert cluster.engines.weight_versions() == [6]
