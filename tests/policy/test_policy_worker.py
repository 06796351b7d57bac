"""A policy worker computes the same log-probabilities and the same step however the model and the batch are cut."""

import pytest
import torch
import transformers

from refit_transport.rl.batch import pad_sequences
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.losses import ClippedPolicyLoss
from refit_transport.rl.policy.worker import PolicyWorker
from tests.models import make_model
from tests.trainers.forked_ranks import run_ranks

ROWS = 5
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.5}}
ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
LOSS = ClippedPolicyLoss(LossConfig(reference_policy_kl_penalty=0.0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_model("qwen3", tmp_path_factory.mktemp("model"), seed=1, dtype="float32", num_hidden_layers=1)


def make_config(path, **overrides):
    config = {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_grad_norm": 1.0,
        "optimizer": SGD,
    }
    return config | overrides


def make_batch(rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 300, (3 + i % 3,), generator=generator).tolist() for i in range(rows)]
    answers = [torch.randint(2, 300, (2 + i % 4,), generator=generator).tolist() for i in range(rows)]
    batch = pad_sequences(prompts, answers, [[-5.0] * len(a) for a in answers], 0, length_multiple=4)
    batch["prev_logprobs"] = batch["generation_logprobs"].clone()
    batch["advantages"] = torch.randn(rows, 1, generator=generator).expand_as(batch["token_mask"]).contiguous()
    batch["sample_mask"][1] = 0.0
    return batch


def make_worker(rank, world_size, config):
    return PolicyWorker(rank, world_size, "", 0, config)


def full_weights(worker):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in worker.model.state_dict().items()
    }


def one_step(rank, world_size, config):
    worker = make_worker(rank, world_size, config)
    batch = make_batch()
    before = worker.logprobs(batch)
    metrics = worker.train(batch, LOSS)
    return before, metrics, full_weights(worker)


def reference_logprobs(path, batch, temperature=1.0):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits / temperature
    picked = logits.log_softmax(-1)[:, :-1].gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    picked = torch.nn.functional.pad(picked, (1, 0))
    inside = torch.arange(picked.shape[1])[None] < batch["input_lengths"][:, None]
    return torch.where(inside, picked, 0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_unsharded_model(checkpoint, temperature):
    batch = make_batch()
    config = make_config(checkpoint, generation={"temperature": temperature}, logprob_chunk_size=3)

    def rank_body(rank):
        worker = make_worker(rank, 2, config)
        return worker.rows(ROWS), worker.logprobs(batch)

    results = run_ranks(2, rank_body)
    assert [list(rows) for rows, _ in results] == [[0, 1, 2], [3, 4]]
    got = torch.cat([logprobs for _, logprobs in results])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference_logprobs(checkpoint, batch, temperature), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def single_rank_step(checkpoint):
    (result,) = run_ranks(1, one_step, 1, make_config(checkpoint))
    return result


LAYOUTS = {
    "fsdp2": (2, {}),
    "fsdp3, last rank idle": (3, {"train_global_batch_size": 4}),
    "hsdp 2x2": (4, {"dtensor_cfg": {"dp_replicate_size": 2}}),
    "tp2": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "tp2 x fsdp2": (4, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "hsdp 2x1 x tp2": (4, {"dtensor_cfg": {"dp_replicate_size": 2, "tensor_parallel_size": 2}}),
    "micro-batches of one row": (1, {"train_micro_batch_size": 1}),
    "one micro-batch": (1, {"train_micro_batch_size": 64}),
    "activation checkpointing": (1, {"dtensor_cfg": {"activation_checkpointing": True}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_optimizer_step_does_not_depend_on_the_layout(checkpoint, single_rank_step, layout):
    world_size, overrides = LAYOUTS[layout]
    if "train_global_batch_size" in overrides:
        (expected,) = run_ranks(1, one_step, 1, make_config(checkpoint, **overrides))
    else:
        expected = single_rank_step
    results = run_ranks(world_size, one_step, world_size, make_config(checkpoint, **overrides))
    for _, metrics, weights in results:
        assert set(metrics) == set(expected[1])
        for name, value in expected[1].items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        for name, value in expected[2].items():
            torch.testing.assert_close(
                weights[name], value, atol=2e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
    untrained = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert not torch.allclose(untrained["lm_head.weight"], results[0][2]["lm_head.weight"], atol=1e-3)


def test_gradients_are_clipped_to_the_global_norm(checkpoint):
    def rank_body(rank, max_norm):
        worker = make_worker(rank, 2, make_config(checkpoint, max_grad_norm=max_norm, optimizer=SGD))
        before = full_weights(worker)
        metrics = worker.train(make_batch(), LOSS)
        after = full_weights(worker)
        step = sum((after[n] - before[n]).double().square().sum() for n in before).sqrt() / SGD["kwargs"]["lr"]
        return metrics["grad_norm"], float(step)

    (norm, applied), _ = run_ranks(2, rank_body, None)
    assert applied == pytest.approx(norm, rel=1e-3)
    (same_norm, clipped), _ = run_ranks(2, rank_body, norm / 10)
    assert same_norm == norm
    assert clipped == pytest.approx(norm / 10, rel=1e-3)


def test_one_optimizer_step_per_global_batch_and_one_schedule_step_per_call(checkpoint):
    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 0.25, "total_iters": 100}},
        {"milestones": [2]},
    ]
    config = make_config(checkpoint, train_global_batch_size=2, scheduler=schedule, optimizer=ADAMW)

    def rank_body(rank):
        worker = make_worker(rank, 1, config)
        rates = [worker.train(make_batch(), LOSS)["lr"] for _ in range(3)]
        return rates, next(iter(worker.optimizer.state.values()))["step"].item()

    ((rates, steps),) = run_ranks(1, rank_body)
    assert rates == pytest.approx([0.5e-3, 0.75e-3, 0.25e-3])
    assert steps == 3 * 3


@pytest.mark.parametrize(
    ("world_size", "cfg"),
    [
        (2, {}),
        (2, {"tensor_parallel_size": 2}),
        (4, {"dp_replicate_size": 2}),
        (4, {"dp_replicate_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=["fsdp", "tp", "hsdp", "hsdp x tp"],
)
def test_resuming_continues_bit_for_bit(checkpoint, tmp_path, world_size, cfg):
    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 10}},
        {"name": "torch.optim.lr_scheduler.ConstantLR"},
        {"milestones": [10]},
    ]
    config = make_config(checkpoint, optimizer=ADAMW, scheduler=schedule, dtensor_cfg=cfg)

    def straight(rank):
        worker = make_worker(rank, world_size, config)
        worker.train(make_batch(), LOSS)
        worker.save_checkpoint(tmp_path / "step1", {"step": 1, "weight_version": 7})
        after_save = torch.rand(1)
        metrics = worker.train(make_batch(), LOSS)
        return metrics, full_weights(worker), after_save

    def resumed(rank):
        worker = make_worker(rank, world_size, config)
        torch.rand(5)
        extra = worker.load_checkpoint(tmp_path / "step1")
        assert extra == {"step": 1, "weight_version": 7}
        after_load = torch.rand(1)
        metrics = worker.train(make_batch(), LOSS)
        return metrics, full_weights(worker), after_load

    for (metrics, weights, number), (metrics2, weights2, number2) in zip(
        run_ranks(world_size, straight), run_ranks(world_size, resumed), strict=True
    ):
        assert metrics == metrics2 and number == number2
        assert all(torch.equal(weights[name], weights2[name]) for name in weights)


def test_a_checkpoint_is_replaced_whole_and_read_by_another_number_of_ranks(checkpoint, tmp_path):
    config = make_config(checkpoint, optimizer=ADAMW)

    def save_twice(rank):
        worker = make_worker(rank, 2, config)
        for step in (1, 2):
            worker.train(make_batch(), LOSS)
            worker.save_checkpoint(tmp_path / "latest", {"step": step})
        return full_weights(worker)

    def load(rank):
        worker = make_worker(rank, 1, config)
        assert worker.load_checkpoint(tmp_path / "latest") == {"step": 2}
        return full_weights(worker)

    saved, _ = run_ranks(2, save_twice)
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]
    (loaded,) = run_ranks(1, load)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    (tmp_path / "latest").rename(tmp_path / "latest.old")  # as if the process died between the two renames
    run_ranks(1, load)


def test_an_incomplete_checkpoint_is_refused(checkpoint, tmp_path):
    def rank_body(rank):
        with pytest.raises(FileNotFoundError, match=r"no complete checkpoint at .*nowhere"):
            make_worker(rank, 1, make_config(checkpoint)).load_checkpoint(tmp_path / "nowhere")

    run_ranks(1, rank_body)


def test_reference_logprobs_stay_and_leave_the_weights_untouched(checkpoint):
    batch = make_batch()

    def rank_body(rank):
        worker = make_worker(rank, 2, make_config(checkpoint))
        with pytest.raises(RuntimeError, match="keep_reference"):
            worker.reference_logprobs(batch)
        before = worker.logprobs(batch)
        worker.keep_reference()
        worker.train(batch, LOSS)
        trained = full_weights(worker)
        reference = worker.reference_logprobs(batch)
        untouched = all(torch.equal(trained[n], w) for n, w in full_weights(worker).items())
        return torch.equal(before, reference), untouched, torch.equal(before, worker.logprobs(batch))

    assert run_ranks(2, rank_body) == [(True, True, False)] * 2


@pytest.mark.parametrize("cfg", [{}, {"tensor_parallel_size": 2}], ids=["fsdp", "tp"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_keeps_float32_master_weights(checkpoint, precision, cfg):
    def rank_body(rank):
        config = make_config(checkpoint, precision=precision, optimizer=ADAMW, dtensor_cfg=cfg)
        worker = make_worker(rank, 2, config)
        metrics = worker.train(make_batch(), LOSS)
        return {p.dtype for p in worker.source().parameters()}, metrics["loss"]

    ((dtypes, loss), _) = run_ranks(2, rank_body)
    assert dtypes == {"float32"}
    (_, metrics, _) = run_ranks(1, one_step, 1, make_config(checkpoint))[0]
    assert loss == pytest.approx(metrics["loss"], abs=0.1) and loss != metrics["loss"]


def test_worker_joins_by_address_and_the_source_follows_its_steps(checkpoint):
    def rank_body(rank):
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        worker = PolicyWorker(0, 1, "127.0.0.1", store.port, make_config(checkpoint), timeout_s=20)
        source = worker.source()
        name, (region,) = next(iter(source.holdings().items()))
        before = source.view(name, region).clone()
        worker.train(make_batch(), LOSS)
        assert worker.source() is source and not source.refresh()
        changed = not torch.equal(before, source.view(name, region))
        worker.shutdown()
        return changed

    assert run_ranks(1, rank_body, group=False) == [True]


@pytest.mark.parametrize(
    ("dtensor_cfg", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 x dp_replicate_size 1 must divide .* got 4"),
        ({"expert_parallel_size": 2, "tensor_parallel_size": 4}, "expert_parallel_size: got 2, allowed 1, or a multip"),
        ({"expert_parallel_size": 4, "dp_replicate_size": 2}, "divides the 2 ranks of a replica"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(dtensor_cfg, message):
    from refit_transport.rl.policy.parallel import ParallelSizes

    with pytest.raises(ValueError, match=message):
        ParallelSizes.of(dtensor_cfg, 4)


def test_tied_weights_stay_tied_under_tensor_parallelism(tmp_path):
    path = make_model("qwen3_tied", tmp_path, seed=1, dtype="float32", num_hidden_layers=1)
    ((_, expected, weights),) = run_ranks(1, one_step, 1, make_config(path))
    sizes = {"dtensor_cfg": {"tensor_parallel_size": 2}}

    def rank_body(rank):
        worker = make_worker(rank, 2, make_config(path, **sizes))
        metrics = worker.train(make_batch(), LOSS)
        model = worker.model
        return metrics, full_weights(worker), model.lm_head.weight is model.model.embed_tokens.weight

    for metrics, sharded, tied in run_ranks(2, rank_body):
        assert tied
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        torch.testing.assert_close(sharded["lm_head.weight"], weights["lm_head.weight"], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "cfg", "message"),
    [
        ("nemotron_h", {}, "tensor_parallel_size: got 2, allowed 1: transformers has no tensor-parallel plan for Nem"),
        ("qwen3", {"lora_cfg": {"enabled": True}}, "lora_cfg.enabled: got true with tensor_parallel_size 2, allowed"),
    ],
)
def test_what_tensor_parallelism_cannot_cut_is_refused(tmp_path, family, cfg, message):
    path = make_model(family, tmp_path, seed=1, dtype="float32")

    def rank_body(rank):
        with pytest.raises(ValueError, match=message):
            make_worker(rank, 2, make_config(path, dtensor_cfg={"tensor_parallel_size": 2, **cfg}))

    run_ranks(2, rank_body)


def test_lora_policy_trains_adapters_only_and_resumes(checkpoint, tmp_path):
    lora = {"enabled": True, "dim": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    config = make_config(checkpoint, optimizer=ADAMW, dtensor_cfg={"lora_cfg": lora})
    name = "model.layers.0.mlp.down_proj.weight"

    def rank_body(rank):
        worker = make_worker(rank, 2, config)
        start = full_weights(worker)
        sent = {n: worker.source().view(n, r).clone() for n, rs in worker.source().holdings().items() for r in rs}
        worker.keep_reference()
        reference = worker.logprobs(make_batch())
        worker.train(make_batch(), LOSS)
        worker.train(make_batch(), LOSS)
        worker.save_checkpoint(tmp_path / "lora", {})
        trained = full_weights(worker)
        changed = {n for n, w in trained.items() if not torch.equal(w, start[n])}
        assert changed and all("lora_" in n for n in changed)
        assert torch.equal(worker.reference_logprobs(make_batch()), reference)
        assert not worker.source().refresh()
        (region,) = worker.source().holdings()[name]
        assert not torch.equal(worker.source().view(name, region), sent[name])
        again = make_worker(rank, 2, config)
        again.load_checkpoint(tmp_path / "lora")
        assert all(torch.equal(w, trained[n]) for n, w in full_weights(again).items())
        return sorted(sent)

    names, _ = run_ranks(2, rank_body)
    assert names == sorted(transformers.AutoModelForCausalLM.from_pretrained(checkpoint).state_dict())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3", "nemotron_h", "qwen3_next", "deepseek_v3"])
def test_other_families_train_alike_on_one_and_two_ranks(family, tmp_path):
    path = make_model(family, tmp_path, seed=1, dtype="float32")
    ((_, expected, _),) = run_ranks(1, one_step, 1, make_config(path))
    for _, metrics, _ in run_ranks(2, one_step, 2, make_config(path)):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


MOE_LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "ep2 x fsdp2": (4, {"dtensor_cfg": {"tensor_parallel_size": 2, "expert_parallel_size": 2}}),
    "ep2, each rank its own tokens": (2, {"dtensor_cfg": {"expert_parallel_size": 2}}),
    "ep2 x fsdp2, each rank its own tokens": (4, {"dtensor_cfg": {"expert_parallel_size": 2}}),
    "ep4 over tp2": (4, {"dtensor_cfg": {"tensor_parallel_size": 2, "expert_parallel_size": 4}}),
    "ep2 in two replicas": (4, {"dtensor_cfg": {"dp_replicate_size": 2, "expert_parallel_size": 2}}),
}


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_one_step_of_a_mixture_of_experts_does_not_depend_on_the_layout(layout, tmp_path):
    path = make_model("qwen3_moe", tmp_path, seed=1, dtype="float32", num_hidden_layers=1)
    world_size, overrides = MOE_LAYOUTS[layout]
    ((_, expected, weights),) = run_ranks(1, one_step, 1, make_config(path))
    for _, metrics, sharded in run_ranks(world_size, one_step, world_size, make_config(path, **overrides)):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for name, value in weights.items():
            torch.testing.assert_close(sharded[name], value, atol=5e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_source_made_before_the_first_step_stays_true_on_uneven_shards(tmp_path):
    path = make_model("qwen3", tmp_path, seed=1, dtype="float32", intermediate_size=50, num_hidden_layers=1)

    def rank_body(rank):
        worker = make_worker(rank, 3, make_config(path))
        source = worker.source()
        views = {(n, r): source.view(n, r) for n, regions in source.holdings().items() for r in regions}
        worker.logprobs(make_batch())
        worker.train(make_batch(), LOSS)
        worker.logprobs(make_batch())
        if source.refresh():
            views = {(n, r): source.view(n, r) for n, r in views}
        weights = full_weights(worker)
        assert {region.shape[0] for (name, region) in views if "gate_proj" in name} <= {17, 16}
        return all(torch.equal(view, weights[name][region.slices()]) for (name, region), view in views.items())

    assert run_ranks(3, rank_body) == [True] * 3
