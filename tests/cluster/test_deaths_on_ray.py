"""A killed process ends what the others do, with an error that names it: two trainer ranks, one engine of two ranks.

Each test has a cluster of its own, since it takes it apart.
"""

import os
import signal
import time

import pytest
from omegaconf import OmegaConf

from refit_transport.cluster.errors import ClusterError
from refit_transport.cluster.run import localise, running
from refit_transport.cluster.trainer_group import RemotePolicy
from refit_transport.config import load_config
from refit_transport.rl.batch import pad_sequences
from refit_transport.session.errors import RefitError

pytestmark = pytest.mark.engine

RECIPE = "recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml"
TIMEOUT = 60.0


@pytest.fixture
def cluster(tmp_path):
    settings = [f"logger.log_dir={tmp_path}", f"policy.generation.refit_cfg.nccl_reshard.timeout_s={TIMEOUT}"]
    tree = OmegaConf.to_container(load_config(RECIPE, settings))
    localise(tree)
    with running(tree) as cluster:
        yield cluster


def test_a_killed_engine_worker_ends_the_refit_with_its_name(cluster):
    victim = cluster.engines.worker_pids(0)[1]
    os.kill(victim, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RefitError, match=r"engine"):
        cluster.refit.refit(100)
    assert time.monotonic() - started < TIMEOUT


def test_a_killed_trainer_ends_the_step_with_its_name(cluster):
    pid = int(cluster.trainers.names[1].partition("pid ")[2].rstrip(")"))
    os.kill(pid, signal.SIGKILL)
    batch = pad_sequences([[5, 6, 7]] * 4, [[8]] * 4, [[0.0]] * 4, pad_token_id=0)
    started = time.monotonic()
    with pytest.raises(ClusterError, match=rf"trainer rank 1 \(pid {pid}\) died while computing log-probabilities"):
        RemotePolicy(cluster.trainers).logprobs(batch)
    assert time.monotonic() - started < 20
