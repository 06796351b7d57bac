"""A sharded model is filled from a checkpoint exactly, and each rank reads only what it holds."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from refit_transport.rl.policy.loading import load_sharded
from refit_transport.rl.policy.lora import add_adapters
from refit_transport.rl.policy.parallel import ParallelSizes
from refit_transport.trainers.dtensor_load import CheckpointFiles
from tests.models import make_model
from tests.trainers.forked_ranks import run_ranks

LANGUAGE_MODELS = ["qwen3", "qwen3_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_next"]


def full_state(model):
    """Parameters and all buffers, also those that no checkpoint has."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


def load(rank, world_size, config, wrap=None):
    sizes = ParallelSizes.of(config.get("dtensor_cfg") or {}, world_size)
    return load_sharded(config, sizes, torch.device("cpu"), wrap)


def count_reads(monkeypatch):
    """Elements read in this process, from now on."""
    read, seen = CheckpointFiles.read, []

    def counting(files, name, region):
        seen.append(region.numel)
        return read(files, name, region)

    monkeypatch.setattr(CheckpointFiles, "read", counting)
    return seen


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_loaded_model_equals_from_pretrained_and_no_rank_reads_more_than_its_share(
    family, replicas, tmp_path, monkeypatch
):
    path = make_model(family, tmp_path, seed=1)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state = full_state(expected)
    world_size = 2 * replicas

    def rank_body(rank):
        seen = count_reads(monkeypatch)
        model = load(rank, world_size, {"model_name": str(path), "dtensor_cfg": {"dp_replicate_size": replicas}})
        ids = torch.arange(8)[None]
        with torch.no_grad():
            return full_state(model), sum(seen), model.eval()(input_ids=ids).logits

    total = sum(p.numel() for p in expected.parameters())
    for loaded, elements, logits in run_ranks(world_size, rank_body):
        assert loaded.keys() == state.keys()
        for name, value in state.items():
            assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
        torch.testing.assert_close(logits, expected(input_ids=torch.arange(8)[None]).logits, atol=1e-4, rtol=1e-4)
        assert elements < 0.6 * total


def test_tied_weights_stay_tied_after_loading(tmp_path):
    path = make_model("qwen3_tied", tmp_path, seed=1)

    def rank_body(rank):
        model = load(rank, 2, {"model_name": str(path)})
        return model.lm_head.weight is model.model.embed_tokens.weight

    assert run_ranks(2, rank_body) == [True, True]


def test_checkpoint_in_a_foreign_naming_is_loaded_whole(tmp_path, monkeypatch):
    path = make_model("qwen3", tmp_path, seed=1)
    expected = full_state(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    tensors = {name.removeprefix("model."): t for name, t in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def rank_body(rank):
        seen = count_reads(monkeypatch)
        return full_state(load(rank, 2, {"model_name": str(path)})), seen

    for loaded, seen in run_ranks(2, rank_body):
        assert not seen
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_adapters_start_alike_on_every_layout(tmp_path):
    path = make_model("qwen3", tmp_path, seed=1)

    def rank_body(rank, world_size, cfg):
        config = {"model_name": str(path), "dtensor_cfg": cfg}
        return full_state(load(rank, world_size, config, lambda m: add_adapters(m, {"dim": 4})))

    (alone,) = run_ranks(1, rank_body, 1, {})
    a = [value for name, value in alone.items() if name.endswith("lora_A.weight")]
    assert all(value.any() for value in a) and not torch.equal(a[0], a[1])
    for cfg in ({}, {"dp_replicate_size": 2}):
        for loaded in run_ranks(2, rank_body, 2, cfg):
            assert all(torch.equal(loaded[name], value) for name, value in alone.items())
