"""Recipes whose engines differ in shape, or span data-parallel cores, on Ray: a few steps with real refits."""

from contextlib import contextmanager

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from refit_transport.cluster.awaiting import await_all
from refit_transport.cluster.run import localise, running
from refit_transport.cluster.trainer_group import RemotePolicy
from refit_transport.config import load_valid
from refit_transport.rl.protocols import SamplingConfig
from refit_transport.rl.run import run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHAPES, EXPERTS = "grpo-reverse-digits-1n5r-fsdp2-tp2-and-tp1", "grpo-reverse-digits-moe-1n4r-fsdp2-dp2ep2"
PROMPTS = [[4 + digit, 5, 6, 17] for digit in range(8)]
DEADLINE_S = 60.0
GREEDY = SamplingConfig(4, temperature=0.0)


@contextmanager
def cluster_of(recipe, folder):
    """Configuration and actors of a recipe of two steps."""
    common = [f"logger.log_dir={folder}", "grpo.max_num_steps=2", "checkpointing.enabled=false"]
    tree = OmegaConf.to_container(load_valid(f"recipes/{recipe}.yaml", common, algorithm="grpo"))
    localise(tree)
    with running(tree) as cluster:
        yield tree, cluster


def train(tree, cluster, folder):
    tokenizer = AutoTokenizer.from_pretrained(tree["policy"]["model_name"])
    policy = RemotePolicy(cluster.trainers)
    summary = run(tree, OmegaConf.to_yaml(tree), folder, policy, cluster.engines, cluster.refit, tokenizer)
    assert (summary.steps, summary.refits) == (2, 2)
    assert summary.token_mult_prob_error_max < 1.05
    assert summary.bytes_reshard > 0


def test_engines_of_different_shapes_share_the_prompts_and_the_version(tmp_path):
    with cluster_of(SHAPES, tmp_path) as (tree, cluster):
        assert [len(cluster.engines.worker_pids(replica)) for replica in (0, 1)] == [2, 1]
        train(tree, cluster, tmp_path)
        assert cluster.engines.weight_versions() == [2, 2]
        wide, narrow = await_all(cluster.engines.calls("generate", PROMPTS, GREEDY), "generating", DEADLINE_S)
        assert [list(c.token_ids) for c in wide] == [list(c.token_ids) for c in narrow]


def test_experts_spread_over_the_cores_of_a_data_parallel_engine(tmp_path):
    with cluster_of(EXPERTS, tmp_path) as (tree, cluster):
        assert cluster.engines.names[1].startswith("engine 0 core 1")
        assert len(cluster.engines.worker_pids(0)) == 2
        train(tree, cluster, tmp_path)
        assert cluster.engines.weight_versions() == [2]
        alone = cluster.engines.generate(PROMPTS[:1], GREEDY)
        assert [list(c.token_ids) for c in alone] == [
            list(c.token_ids) for c in cluster.engines.generate(PROMPTS, GREEDY)[:1]
        ]
        (first,), (second,) = await_all(cluster.engines.calls("fingerprint"), "hashing weights", DEADLINE_S)
        apart = {path for path in first if first[path] != second[path]}
        assert apart and all("experts" in path for path in apart)
