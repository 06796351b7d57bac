"""Every form in which Megatron stores a tensor is found in the checkpoint: hybrids, grouped experts, prediction layers,
and the names of TransformerEngine and of newer releases."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn

from refit_transport.layout.region import LayoutError
from refit_transport.rl.policy.megatron_cpu import on_cpu
from refit_transport.rl.policy.megatron_model import build_chunks, initialize_groups
from refit_transport.trainers.dtensor_load import CheckpointFiles
from refit_transport.trainers.megatron import MegatronSource
from refit_transport.trainers.megatron.load import load_checkpoint
from tests.megatron.cases import cut
from tests.megatron.hybrid import build_hybrid
from tests.megatron.latent_attention import plain_attention
from tests.megatron.mamba_scan import mamba_in_torch
from tests.models import VOCABULARY, make_model
from tests.trainers.forked_ranks import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")

TOKENS = torch.arange(2, 26).view(2, 12)
HYBRIDS = {
    "dense": {},
    "experts": dict(
        layers_block_type=["mamba", "moe", "attention", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        n_group=1,
        topk_group=1,
    ),
}


def facts_of(path: Path) -> dict:
    return transformers.AutoConfig.from_pretrained(path).to_dict()


def logits_of(model: nn.Module) -> torch.Tensor:
    length = TOKENS.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model(input_ids=TOKENS, position_ids=torch.arange(length).expand_as(TOKENS), attention_mask=mask)


def expected_logits(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_mamba_hybrid_gives_the_logits_of_its_checkpoint(kind, size, tmp_path):
    # transformers cuts time steps off at the bottom, Megatron does not.
    path = make_model("nemotron_h", tmp_path, seed=1, dtype="float32", time_step_min=1e-12, **HYBRIDS[kind])

    def rank_body(rank):
        with on_cpu(), mamba_in_torch():
            initialize_groups(cut(tp=size))
            model = build_hybrid(facts_of(path), size)
            source = MegatronSource(model, facts_of(path))
            load_checkpoint(source, CheckpointFiles(path))
            return logits_of(model), {p.name: p.dtype for p in source.parameters()}

    results = run_ranks(size, rank_body)
    logits = torch.cat([logits for logits, _ in results], dim=-1)[..., :VOCABULARY]
    torch.testing.assert_close(logits, expected_logits(path), atol=1e-5, rtol=0)
    assert set(results[0][1]) == set(CheckpointFiles(path).names())


def grouped_matmul(a, b, batch_sizes, trans_b=False):
    parts = torch.split(a, batch_sizes.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, b, strict=True)])


@pytest.mark.parametrize(("size", "layout"), [(2, cut(ep=2)), (2, cut(tp=2, etp=2, sp=True))])
def test_grouped_experts_are_transposed_views_of_the_checkpoint(size, layout, tmp_path):
    from megatron.core.transformer.moe import experts

    if not hasattr(experts, "GroupedMLP"):
        pytest.skip("this release of megatron-core has no GroupedMLP")
    from megatron.core.transformer.moe import grouped_gemm_util

    path = make_model("qwen3_moe", tmp_path, seed=1, dtype="float32", num_hidden_layers=1)
    kernels = SimpleNamespace(ops=SimpleNamespace(gmm=grouped_matmul))

    def grouped(facts, settings):
        return original(facts, settings) | dict(moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True)

    from refit_transport.rl.policy import megatron_model

    original = megatron_model._expert_fields

    def rank_body(rank):
        with (
            on_cpu(),
            patch.object(grouped_gemm_util, "grouped_gemm", kernels),
            patch.object(grouped_gemm_util, "ops", kernels.ops),
            patch.object(megatron_model, "_expert_fields", grouped),
        ):
            initialize_groups(layout)
            (model,) = build_chunks(facts_of(path), layout, torch.float32, 64)
            assert "decoder.layers.0.mlp.experts.weight1" in dict(model.named_parameters())
            source = MegatronSource(model, facts_of(path))
            load_checkpoint(source, CheckpointFiles(path))
            model.config.bf16 = True  # it says so in float32 too, else the kernel is refused
            return logits_of(model)

    parts = run_ranks(size, rank_body)
    cut_vocabulary = layout["tensor_model_parallel_size"] > 1
    for logits in [torch.cat(parts, dim=-1)] if cut_vocabulary else parts:
        torch.testing.assert_close(logits[..., :VOCABULARY], expected_logits(path), atol=1e-5, rtol=0)


@pytest.mark.parametrize("stages", [1, 2])
def test_prediction_layers_follow_the_decoders_and_share_its_embedding(stages, tmp_path):
    path = make_model("deepseek_v3", tmp_path, seed=1, dtype="float32", kv_lora_rank=64)
    layout = cut(pp=stages, mtp_num_layers=1)

    def rank_body(rank):
        with on_cpu(), plain_attention():
            initialize_groups(layout)
            (model,) = build_chunks(facts_of(path), layout, torch.float32, 64)
            source = MegatronSource(model, facts_of(path))
            again = [held.name for held in source.stored()]
            return {p.name: p.shape for p in source.parameters()}, len(again) - len(set(again))

    results = run_ranks(stages, rank_body)
    names = {name: shape for held, _ in results for name, shape in held.items()}
    extra = {name: shape for name, shape in names.items() if name not in CheckpointFiles(path).names()}
    assert set(CheckpointFiles(path).names()) <= set(names)
    assert all(name.startswith("model.layers.2.") for name in extra)
    assert extra["model.layers.2.eh_proj.weight"] == (128, 256)
    assert {"model.layers.2.enorm.weight", "model.layers.2.hnorm.weight", "model.layers.2.shared_head.norm.weight",
            "model.layers.2.self_attn.kv_b_proj.weight", "model.layers.2.mlp.experts.7.down_proj.weight",
            "model.layers.2.mlp.gate.e_score_correction_bias"} <= set(extra)  # fmt: skip
    assert "model.embed_tokens.weight" in results[-1][0]


def move(model: nn.Module, old: str, new: str) -> None:
    """Gives a parameter another place, as another release or TransformerEngine would have it."""
    path, _, name = old.rpartition(".")
    owner = model.get_submodule(path)
    parameter = owner._parameters.pop(name)
    path, _, name = new.rpartition(".")
    home = model
    for part in path.split("."):
        if part not in home._modules:
            home.add_module(part, nn.Module())
        home = home._modules[part]
    home.register_parameter(name, parameter)


TRANSFORMER_ENGINE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def renamed(name: str, tail: str) -> str:
    if "local_experts" in tail:
        _, _, _, expert, linear, kind = tail.split(".")
        return name.replace(tail, f"mlp.experts.{linear}.{kind}{expert}")
    return name.replace(tail, TRANSFORMER_ENGINE.get(tail, tail))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_names_of_transformer_engine_mean_the_same(family, tmp_path):
    path = make_model(family, tmp_path, seed=1, dtype="float32")

    def rank_body(rank):
        with on_cpu():
            initialize_groups(cut())
            (model,) = build_chunks(facts_of(path), cut(), torch.float32, 64)
        before = MegatronSource(model, facts_of(path)).holdings()
        for name, _ in list(model.named_parameters()):
            tail = name.split(".", 3)[-1] if name.startswith("decoder.layers") else ""
            if tail and (new := renamed(name, tail)) != name:
                move(model, name, new)
        return set(before) == set(MegatronSource(model, facts_of(path)).holdings()), sum(1 for _ in model.parameters())

    assert run_ranks(1, rank_body) == [(True, {"qwen3": 19, "qwen3_moe": 19 + 2 * 15}[family])]


def test_names_of_newer_releases_mean_the_same(tmp_path):
    path = make_model("nemotron_h", tmp_path, seed=1, dtype="float32")

    def rank_body(rank):
        with on_cpu(), mamba_in_torch():
            initialize_groups(cut())
            model = build_hybrid(facts_of(path), 1)
        before = MegatronSource(model, facts_of(path)).holdings()
        mixer = "decoder.layers.0.mixer"
        names = dict(model.named_parameters())
        for kind in ("weight", "bias"):
            if f"{mixer}.conv1d.{kind}" in names:
                parameter = names[f"{mixer}.conv1d.{kind}"]
                del model.decoder.layers[0].mixer.conv1d._parameters[kind]
                model.decoder.layers[0].mixer.register_parameter(f"conv1d_{kind}", nn.Parameter(parameter.detach()))
        return before == MegatronSource(model, facts_of(path)).holdings()

    assert run_ranks(1, rank_body) == [True]


REFUSED = {
    "a parameter without a rule": (
        lambda model, facts: model.decoder.layers[0].register_parameter("adapter", nn.Parameter(torch.ones(2))),
        r"decoder\.layers\.0\.adapter: no rule says where",
    ),
    "a buffer without a rule": (
        lambda model, facts: model.register_buffer("scale", torch.ones(2)),
        "scale: no rule says where",
    ),
    "another vocabulary": (
        lambda model, facts: facts.update(vocab_size=500),
        "embed_tokens.weight: the model has 116 rows fewer than the 500 of vocab_size",
    ),
    "another tie": (lambda model, facts: facts.update(tie_word_embeddings=True), "tie_word_embeddings is True"),
    "another family": (lambda model, facts: facts.update(model_type="gpt_oss"), "no checkpoint names .* 'gpt_oss'"),
    "another size": (
        lambda model, facts: setattr(model.config, "ffn_hidden_size", 200),
        r"mlp\.linear_fc1\.weight: has 384 entries in dimension 0; allowed are 400",
    ),
    "a quantised tensor": (
        lambda model, facts: model.register_buffer("scale", torch.ones(2).as_subclass(Quantised)),
        "scale: is stored as Quantised, allowed is a plain tensor",
    ),
}  # fmt: skip


class Quantised(torch.Tensor):
    pass


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_place_in_the_checkpoint_is_refused_by_name(reason, tmp_path):
    path = make_model("qwen3", tmp_path, seed=1, dtype="float32")
    spoil, message = REFUSED[reason]

    def rank_body(rank):
        facts = facts_of(path)
        with on_cpu():
            initialize_groups(cut())
            (model,) = build_chunks(facts, cut(), torch.float32, 64)
        spoil(model, facts)
        with pytest.raises((LayoutError, ValueError), match=message):
            MegatronSource(model, facts)

    run_ranks(1, rank_body)


def test_memory_that_moved_is_noticed(tmp_path):
    path = make_model("qwen3", tmp_path, seed=1, dtype="float32")

    def rank_body(rank):
        with on_cpu():
            initialize_groups(cut())
            (model,) = build_chunks(facts_of(path), cut(), torch.float32, 64)
        source = MegatronSource(model, json.loads((path / "config.json").read_text()))
        unmoved = source.refresh()
        norm = model.decoder.final_layernorm.weight
        norm.data = torch.full_like(norm, 7.0)
        moved = source.refresh()
        (region,) = source.holdings()["model.norm.weight"]
        return unmoved, moved, source.view("model.norm.weight", region).unique().tolist()

    assert run_ranks(1, rank_body) == [(False, True, [7.0])]
