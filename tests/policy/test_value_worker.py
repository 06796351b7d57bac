"""The critic's values line up with the tokens they judge, and it learns."""

import pytest
import torch

from refit_transport.rl.loss_config import ValueLossConfig
from refit_transport.rl.policy.value import ValueWorker
from refit_transport.rl.value_loss import ValueLoss
from tests.models import make_model
from tests.policy.test_policy_worker import ROWS, SGD, full_weights, make_batch, make_config
from tests.trainers.forked_ranks import run_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_model("qwen3", tmp_path_factory.mktemp("model"), seed=1, dtype="float32", num_hidden_layers=1)


def make_worker(rank, world_size, path, **overrides):
    torch.manual_seed(0)
    worker = ValueWorker(rank, world_size, "", 0, make_config(path, **overrides))
    return worker


def batch_with_returns():
    batch = make_batch()
    batch["returns"] = batch["token_mask"] * 2.0
    batch["values"] = torch.zeros_like(batch["returns"])
    return batch


def train_and_evaluate(rank, world_size, path, steps):
    worker = make_worker(rank, world_size, path, optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3}})
    batch = batch_with_returns()
    first = worker.values(batch)
    losses = [worker.train(batch, ValueLoss(ValueLossConfig()))["critic/loss"] for _ in range(steps)]
    return first, losses, worker.values(batch), full_weights(worker)


def test_value_loss_falls_and_values_are_zero_at_padding_and_at_the_first_token(checkpoint):
    first, losses, values, _ = run_ranks(2, train_and_evaluate, 2, checkpoint, 12)[0]
    assert not first.any()
    assert losses[-1] < 0.2 * losses[0]
    lengths = batch_with_returns()["input_lengths"]
    inside = torch.arange(values.shape[1])[None] < lengths[: len(values), None]
    inside[:, 0] = False
    assert torch.equal(values != 0, inside)


def test_value_of_a_token_depends_only_on_the_tokens_before_it(checkpoint):
    def rank_body(rank):
        worker = make_worker(rank, 1, checkpoint)
        torch.nn.init.normal_(worker.model.head.weight.to_local())
        batch = make_batch()
        before = worker.values(batch)
        batch["input_ids"] = batch["input_ids"].clone()
        batch["input_ids"][0, 3] += 1
        return before[0], worker.values(batch)[0]

    ((before, after),) = run_ranks(1, rank_body)
    assert torch.equal(before[:4], after[:4])
    assert before[4] != after[4]


@pytest.mark.parametrize(
    ("world", "sizes"), [(3, {}), (2, {"tensor_parallel_size": 2}), (4, {"tensor_parallel_size": 2})]
)
def test_one_step_of_the_critic_does_not_depend_on_the_layout(checkpoint, world, sizes):
    def one_step(rank, world_size, sizes):
        worker = make_worker(rank, world_size, checkpoint, optimizer=SGD, dtensor_cfg=sizes)
        worker.train(batch_with_returns(), ValueLoss(ValueLossConfig(cliprange=0.2)))
        return full_weights(worker)

    (alone,) = run_ranks(1, one_step, 1, {})
    for weights in run_ranks(world, one_step, world, sizes):
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, atol=2e-6, rtol=1e-5)
    assert ROWS % 3 and alone["head.weight"].any()
