"""Presets: tensors as transformers saves them, layouts as Megatron, FSDP2 and vLLM cut, sizes as the names say."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest

from refit_transport.planning.presets.by_name import tensors_by_name
from refit_transport.planning.presets.clusters import CLUSTERS, ClusterError, load_cluster
from refit_transport.planning.presets.layouts import describe_generation, describe_training, domains_for
from refit_transport.planning.presets.models import (
    MODELS,
    Model,
    ModelError,
    UnknownArchitectureError,
    load_model,
    model_from_config,
)
from refit_transport.planning.presets.parallel import Generation, LayoutSizeError, Training, read_layout
from refit_transport.planning.presets.whole import want_whole

SMALL = {
    "llama": dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, intermediate_size=48),
    "qwen3": dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  head_dim=8, intermediate_size=48, tie_word_embeddings=True),
    "qwen3_moe": dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                      num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "deepseek_v3": dict(vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                        intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
                        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
                        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8),
    "qwen3_5_moe_text": dict(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=8,
                             num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                             shared_expert_intermediate_size=16, linear_key_head_dim=8, linear_value_head_dim=8,
                             linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4),
    "nemotron_h": dict(vocab_size=96, hidden_size=32, hybrid_override_pattern="M*E-", num_attention_heads=4, head_dim=8,
                       num_key_value_heads=2, intermediate_size=48, moe_intermediate_size=16, moe_latent_size=8,
                       moe_shared_expert_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
                       mamba_num_heads=4, mamba_head_dim=8, n_groups=2, ssm_state_size=8, conv_kernel=4),
}  # fmt: skip
"""Configurations of every architecture that transformers can build here, small enough to do so at once."""


@pytest.mark.parametrize("model_type", SMALL)
def test_tensors_are_those_that_transformers_would_save(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from refit_transport.trainers.checkpoint_names import checkpoint_tensors

    classes = {"qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig}
    config = (classes.get(model_type) or transformers.CONFIG_MAPPING[model_type])(**SMALL[model_type])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    saved = {t.name: tuple(t.shape) for t in checkpoint_tensors(model, model.state_dict())}
    if config.tie_word_embeddings:
        saved.pop("lm_head.weight", None)
    mine = {
        t.name: t.shape for t in model_from_config("small", {"model_type": model_type, **SMALL[model_type]}, "").tensors
    }
    assert mine == saved


@pytest.mark.parametrize(("name", "parameters"), [
    ("llama-3.2-1b", 1.24e9), ("qwen3-0.6b", 0.596e9), ("qwen3-4b", 4.02e9), ("qwen3-30b-a3b", 30.5e9),
    ("qwen3-235b-a22b", 235.1e9), ("deepseek-v3", 671e9), ("qwen3.5-397b-a17b", 397e9), ("qwen3.8-2.4t-a95b", 2.42e12),
    ("kimi-k3-2.8t", 2.78e12), ("nemotron-3-ultra", 549e9),
])  # fmt: skip
def test_a_preset_has_as_many_parameters_as_its_name_says(name: str, parameters: float) -> None:
    assert sum(prod(t.shape) for t in MODELS[name].tensors) == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize("name", ["qwen3.8-2.4t-a95b", "kimi-k3-2.8t", "nemotron-3-ultra"])
def test_a_preset_with_figures_that_are_not_public_says_so(name: str) -> None:
    assert any("assumed" in note for note in MODELS[name].assumed)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_names_alone_suggest_the_same_cuts_as_the_rules(model_type: str) -> None:
    config = {"model_type": model_type, **SMALL[model_type]}
    ruled = model_from_config("small", config, "").tensors
    assert tensors_by_name([t.parameter for t in ruled], config) == ruled


TINY_MOE = model_from_config("moe", {"model_type": "qwen3_moe", **SMALL["qwen3_moe"]}, "test")
TINY_DEEPSEEK = model_from_config("deepseek", {"model_type": "deepseek_v3", **SMALL["deepseek_v3"]}, "test")
TINY_HYBRID = model_from_config("hybrid", {"model_type": "nemotron_h", **SMALL["nemotron_h"]}, "test")
TRAIN = ["tp=2", "tp=4", "pp=2", "pp=2,ep=2", "tp=2,ep=2,etp=2", "tp=2,cp=2,pp=2,ep=4", "pp=2,dp=2", "fsdp=3",
         "fsdp=2,tp=2,dp=2", "fsdp=8"]  # fmt: skip
GEN = ["tp=2", "tp=4", "tp=2,dp=2", "pp=2,tp=2", "tp=2,ep=4,dp=2", "tp=1,ep=2,dp=4"]


def _covered(model: Model, side, ranks: range) -> None:
    """Every element of every tensor is held somewhere, cells of one rank do not overlap, ranks are in range."""
    for entry, tensor in zip(side.entries, model.tensors, strict=True):
        layout = side.layout_of(entry)
        assert layout.shape == tensor.shape
        held = np.zeros(tensor.shape, bool)
        of_rank: dict[int, int] = {}
        for cell in layout.cells:
            held[cell.region.slices()] = True
            for rank in cell.ranks:
                of_rank[rank] = of_rank.get(rank, 0) + cell.region.numel
        assert held.all(), (entry.name, layout)
        assert set(layout.ranks) <= set(ranks)
        assert max(of_rank.values()) <= prod(tensor.shape), entry.name


@pytest.mark.parametrize("model", [TINY_MOE, TINY_DEEPSEEK, TINY_HYBRID], ids=lambda m: m.name)
@pytest.mark.parametrize("sizes", TRAIN)
def test_trainers_hold_every_element(model: Model, sizes: str) -> None:
    layout = read_layout(sizes, Training, "--train")
    _covered(model, describe_training(model, layout, 5), range(5, 5 + layout.world))


@pytest.mark.parametrize("model", [TINY_MOE, TINY_DEEPSEEK, TINY_HYBRID], ids=lambda m: m.name)
@pytest.mark.parametrize("sizes", GEN)
def test_engines_hold_every_element(model: Model, sizes: str) -> None:
    layout = read_layout(sizes, Generation, "--gen")
    _covered(model, describe_generation(model, layout, 3), range(3, 3 + layout.world))


def _ranks_of(side, name: str) -> dict[str, tuple[int, ...]]:
    entry = next(entry for entry in side.entries if entry.name == name)
    return {str(cell.region): cell.ranks for cell in side.layout_of(entry).cells}


def test_megatron_numbers_tensor_ranks_first_and_pipeline_stages_last() -> None:
    side = describe_training(TINY_MOE, read_layout("tp=2,pp=2,ep=2,dp=2", Training, "--train"))
    assert _ranks_of(side, "model.layers.1.self_attn.o_proj.weight") == {
        "[0:32, 0:16]": (4, 6),
        "[0:32, 16:32]": (5, 7),
    }
    assert _ranks_of(side, "model.layers.0.mlp.experts.3.up_proj.weight") == {"[0:16, 0:32]": (1, 3)}
    assert _ranks_of(side, "model.embed_tokens.weight") == {"[0:96, 0:32]": (0, 2)}


def test_expert_tensor_parallelism_cuts_each_expert_and_not_by_the_dense_ranks() -> None:
    side = describe_training(TINY_MOE, read_layout("tp=2,ep=2,etp=2,dp=2", Training, "--train"))
    assert _ranks_of(side, "model.layers.0.mlp.experts.2.gate_proj.weight") == {
        "[0:8, 0:32]": (2,),
        "[8:16, 0:32]": (3,),
    }


def test_megatron_cuts_through_a_key_value_group_when_there_are_more_ranks_than_groups() -> None:
    # Two groups of [16 query, 8 key, 8 value] rows over four ranks of 16 rows each.
    side = describe_training(TINY_MOE, read_layout("tp=4", Training, "--train"))
    prefix = "model.layers.0.self_attn."
    assert _ranks_of(side, prefix + "q_proj.weight") == {"[0:16, 0:32]": (0,), "[16:32, 0:32]": (2,)}
    assert _ranks_of(side, prefix + "k_proj.weight") == {"[0:8, 0:32]": (1,), "[8:16, 0:32]": (3,)}


def test_engines_replicate_key_value_heads_when_they_have_more_ranks_than_heads() -> None:
    side = describe_generation(TINY_MOE, Generation(tp=4))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert _ranks_of(side, name) == {"[0:8, 0:32]": (0, 1), "[8:16, 0:32]": (2, 3)}


def test_expert_parallel_engines_spread_experts_over_several_data_parallel_ranks() -> None:
    side = describe_generation(TINY_MOE, Generation(tp=2, ep=4, dp=4))
    owners = [_ranks_of(side, f"model.layers.0.mlp.experts.{e}.up_proj.weight")["[0:16, 0:32]"] for e in range(4)]
    assert owners == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_interleaved_pipeline_puts_every_second_run_of_layers_on_the_same_stage() -> None:
    model = model_from_config("d", {"model_type": "qwen3", **SMALL["qwen3"], "num_hidden_layers": 8}, "test")
    side = describe_training(model, read_layout("pp=2,vpp=2", Training, "--train"))
    stages = [_ranks_of(side, f"model.layers.{i}.input_layernorm.weight")["[0:32]"][0] for i in range(8)]
    assert stages == [0, 0, 1, 1, 0, 0, 1, 1]


def test_engine_pipeline_gives_the_remainder_to_stages_before_the_last() -> None:
    model = model_from_config("d", {"model_type": "qwen3", **SMALL["qwen3"], "num_hidden_layers": 7}, "test")
    side = describe_generation(model, Generation(pp=3))
    stages = [_ranks_of(side, f"model.layers.{i}.input_layernorm.weight")["[0:32]"][0] for i in range(7)]
    assert stages == [0, 0, 1, 1, 1, 2, 2]


def test_fsdp_cuts_rows_as_torch_chunk_does() -> None:
    side = describe_training(TINY_DEEPSEEK, read_layout("fsdp=3", Training, "--train"))
    assert _ranks_of(side, "model.norm.weight") == {"[0:11]": (0,), "[11:22]": (1,), "[22:32]": (2,)}


def test_a_large_model_has_few_layouts() -> None:
    model = MODELS["kimi-k3-2.8t"]
    side = describe_generation(model, Generation(tp=32, dp=32))
    assert len(side.entries) == len(model.tensors) > 200_000
    assert len(side.layouts) < 100


def test_wanting_whole_tensors_keeps_the_direct_ones_and_asks_all_ranks_of_the_others() -> None:
    side = describe_generation(TINY_MOE, Generation(tp=2))
    whole = want_whole(side, {"model.norm.weight"})
    by_name = {entry.name: entry for entry in whole.entries}
    assert not by_name["model.norm.weight"].whole
    assert by_name["lm_head.weight"].whole
    assert [cell.ranks for cell in whole.layout_of(by_name["lm_head.weight"]).cells] == [(0, 1)]


def test_each_side_starts_on_a_domain_of_its_own() -> None:
    assert domains_for(CLUSTERS["dgx-h100"], 12, 8) == (tuple(range(8)), (8, 9, 10, 11), tuple(range(12, 20)))
    assert domains_for(CLUSTERS["dgx-h100"], 8, 4, colocated=True) == (tuple(range(8)),)


def test_data_parallel_size_defaults_to_what_the_experts_need() -> None:
    assert read_layout("pp=16,ep=16", Training, "--train").world == 256
    assert read_layout("tp=2,cp=2,pp=4,ep=16", Training, "--train").world == 64
    assert read_layout("tp=8,ep=32,pp=2", Training, "--train").world == 64


@pytest.mark.parametrize(("text", "kind", "complaints"), [
    ("tp=0,foo=2,pp", Training, ["unknown size 'foo'", "'pp' is not pp=NUMBER", "tp must be at least 1"]),
    ("tp=2,tp=4", Training, ["tp is given twice"]),
    ("tp=2,ep=3,dp=2", Training, ["do not divide by ep*etp = 3", "set dp to a multiple of 3"]),
    ("fsdp=2,pp=2", Training, ["fsdp combines with tp and dp only"]),
    ("tp=4,ep=6,dp=3", Generation, ["ep = 6 must be 1, or a multiple of tp = 4"]),
])  # fmt: skip
def test_impossible_sizes_are_all_reported_at_once(text: str, kind: type, complaints: list[str]) -> None:
    with pytest.raises(LayoutSizeError) as caught:
        read_layout(text, kind, "--x")
    assert all(complaint in str(caught.value) for complaint in complaints)


def test_sizes_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts of moe do not divide over ep = 3"):
        describe_training(TINY_MOE, Training(ep=3, dp=3))
    with pytest.raises(ValueError, match="only 2 layers"):
        describe_generation(TINY_MOE, Generation(pp=4))


def test_a_configuration_file_is_read_and_what_is_wrong_with_it_named(tmp_path) -> None:
    good, bad, other, short = (tmp_path / f"{name}.json" for name in ("good", "bad", "other", "short"))
    good.write_text(json.dumps({"model_type": "qwen3_moe", **SMALL["qwen3_moe"]}))
    bad.write_text("{")
    other.write_text(json.dumps({"model_type": "rwkv9"}))
    short.write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    assert load_model(str(good)).tensors == TINY_MOE.tensors
    assert load_model("Qwen3-4B") is MODELS["qwen3-4b"]
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(str(bad))
    with pytest.raises(UnknownArchitectureError, match="no rule for model_type 'rwkv9'"):
        load_model(str(other))
    with pytest.raises(ModelError, match="lacks 'num_hidden_layers'"):
        load_model(str(short))
    with pytest.raises(ModelError, match="presets: llama"):
        load_model("nothing")


def test_a_cluster_file_overrides_a_preset_and_its_violations_are_all_reported(tmp_path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("base: dgx-h100\nnic_gbit_per_s: 200\nnode_ports: 4\n")
    cluster = load_cluster(str(good))
    assert (cluster.nic_rate, cluster.node_ports, cluster.ports_shared_by) == (25e9, 4, 2)
    bad.write_text("nic_rate: -1\nnetwork_efficiency: 1.5\nspeed: 3\nnode_ranks: 2.5\n")
    with pytest.raises(ClusterError) as caught:
        load_cluster(str(bad))
    for complaint in ("nic_rate must be a positive", "network_efficiency is a share", "unknown field 'speed'",
                      "node_ranks must be a whole number", "copy_rate is missing"):  # fmt: skip
        assert complaint in str(caught.value)
    with pytest.raises(ClusterError, match="no preset and no file"):
        load_cluster("dgx-z9")


@pytest.mark.parametrize(
    ("describe", "sizes"), [(describe_generation, Generation(tp=2, pp=2)), (describe_training, Training(tp=2, pp=2))]
)
def test_a_tied_embedding_lies_on_the_first_and_on_the_last_pipeline_stage(describe, sizes) -> None:
    config = {"model_type": "qwen3", **SMALL["qwen3"], "vocab_size": 256}
    side = describe(model_from_config("tied", config, "test"), sizes)
    layouts = {entry.name: side.layout_of(entry) for entry in side.entries}
    assert layouts["model.embed_tokens.weight"].ranks == (0, 1, 2, 3)
    assert layouts["model.norm.weight"].ranks == (2, 3)


def test_experts_are_counted_under_the_name_that_transformers_5_writes() -> None:
    config = {"model_type": "qwen3_moe", **SMALL["qwen3_moe"]}
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in config.items()}
    assert model_from_config("moe", renamed, "test").tensors == model_from_config("moe", config, "test").tensors
