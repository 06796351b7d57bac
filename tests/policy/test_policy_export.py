"""The trained policy is written as a Hugging Face checkpoint that loads anywhere."""

import pytest
import torch
import transformers

from tests.models import make_model, read_checkpoint
from tests.policy.test_policy_worker import LOSS, make_batch, make_config, make_worker
from tests.trainers.forked_ranks import run_ranks


@pytest.mark.parametrize(
    ("family", "ranks", "cfg"),
    [
        ("qwen3_tied", 3, {}),
        ("qwen3_moe", 3, {}),
        ("deepseek_v3", 3, {}),
        ("qwen3_tied", 4, {"dp_replicate_size": 2, "tensor_parallel_size": 2}),
        ("qwen3_moe", 4, {"tensor_parallel_size": 2, "expert_parallel_size": 4}),
        ("mixtral", 4, {"expert_parallel_size": 2}),
        ("deepseek_v3", 4, {"dp_replicate_size": 2, "expert_parallel_size": 2}),
    ],
)
def test_untrained_policy_is_written_as_it_was_read(family, ranks, cfg, tmp_path):
    path = make_model(family, tmp_path / "made", seed=1, dtype="float32", num_hidden_layers=2)

    def rank_body(rank):
        make_worker(rank, ranks, make_config(path, dtensor_cfg=cfg)).save_pretrained(tmp_path / "saved")

    run_ranks(ranks, rank_body)
    expected, got = read_checkpoint(path), read_checkpoint(tmp_path / "saved")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert sorted(f.name for f in tmp_path.iterdir()) == ["made", "saved"]
    transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    "cfg", [{"tensor_parallel_size": 2}, {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 32}}], ids=["tp", "lora"]
)
def test_trained_policy_computes_the_same_after_reloading(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr("refit_transport.rl.policy.export.save_pretrained.__defaults__", (100_000,))  # several files
    path = make_model("qwen3", tmp_path / "made", seed=1, dtype="float32", num_hidden_layers=1)
    batch = make_batch()

    def rank_body(rank):
        optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}}
        worker = make_worker(rank, 2, make_config(path, dtensor_cfg=cfg, optimizer=optimizer))
        for _ in range(2):
            worker.train(batch, LOSS)
        worker.save_pretrained(tmp_path / "saved")
        worker.save_pretrained(tmp_path / "half", dtype="bfloat16")
        return worker.rows(len(batch["input_ids"])), worker.logprobs(batch)

    def reload(rank):
        return make_worker(rank, 1, make_config(tmp_path / "saved")).logprobs(batch)

    results = run_ranks(2, rank_body)
    (reloaded,) = run_ranks(1, reload)
    for rows, logprobs in results:
        torch.testing.assert_close(reloaded[rows.start : rows.stop], logprobs, atol=1e-4, rtol=1e-4)
    full, half = read_checkpoint(tmp_path / "saved"), read_checkpoint(tmp_path / "half")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in full.items())
    assert any(not torch.equal(value, full[name]) for name, value in read_checkpoint(path).items())
