"""Classification of the names of published checkpoints: what is not seen as feed-forward loses the fast path."""

from __future__ import annotations

import time

import pytest

from refit_transport.layout.layout import LogicalParameter
from refit_transport.planning.classify import classify
from refit_transport.planning.plan import Route


def layer(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


ATTENTION = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
GATED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
MLA = (
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
)
MLP = tuple(f"mlp.{name}" for name in GATED)
EXPERTS = tuple(f"mlp.experts.{expert}.{name}" for expert in (0, 1) for name in GATED)


FAMILIES = {
    "llama": (layer("model.layers.0", *MLP), [*layer("model.layers.0", *ATTENTION, *NORMS), *ENDS]),
    "qwen2 with attention biases": (
        layer("model.layers.0", *MLP),
        [*layer("model.layers.0", *ATTENTION, *NORMS, "self_attn.q_proj.bias"), *ENDS],
    ),
    "qwen3": (
        layer("model.layers.0", *MLP),
        [*layer("model.layers.0", *ATTENTION, *NORMS, "self_attn.q_norm.weight", "self_attn.k_norm.weight"), *ENDS],
    ),
    "qwen3-moe": (
        layer("model.layers.0", *EXPERTS),
        [*layer("model.layers.0", *ATTENTION, *NORMS, "mlp.gate.weight"), *ENDS],
    ),
    "qwen3-next": (
        layer("model.layers.0", *EXPERTS, *(f"mlp.shared_expert.{name}" for name in GATED)),
        [
            *layer(
                "model.layers.0",
                "linear_attn.in_proj_qkvz.weight",
                "linear_attn.in_proj_ba.weight",
                "linear_attn.conv1d.weight",
                "linear_attn.A_log",
                "linear_attn.dt_bias",
                "linear_attn.norm.weight",
                "linear_attn.out_proj.weight",
                "mlp.gate.weight",
                "mlp.shared_expert_gate.weight",
                *NORMS,
            ),
            *layer("model.layers.3", *ATTENTION, *NORMS),
            *layer("mtp.layers.0", *EXPERTS, *ATTENTION, "mlp.shared_expert.up_proj.weight", *NORMS),
            "mtp.fc.weight",
            "mtp.norm.weight",
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            *ENDS,
        ],
    ),
    "deepseek-v3": (
        [
            *layer("model.layers.0", *MLP),
            *layer("model.layers.3", *EXPERTS, *(f"mlp.shared_experts.{name}" for name in GATED)),
        ],
        [
            *layer("model.layers.0", *MLA, *NORMS, *(f"{name}_scale_inv" for name in MLP)),
            *layer("model.layers.3", *MLA, *NORMS, "mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
            *layer("model.layers.3", "mlp.experts.0.gate_proj.weight_scale_inv"),
            *layer("model.layers.61", *MLA, *NORMS, *EXPERTS, *(f"mlp.shared_experts.{name}" for name in GATED)),
            *layer("model.layers.61", "enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight"),
            *layer("model.layers.61", "shared_head.norm.weight", "shared_head.head.weight", "mlp.gate.weight"),
            *ENDS,
        ],
    ),
    "mixtral": (
        layer("model.layers.0", *(f"block_sparse_moe.experts.{e}.w{i}.weight" for e in (0, 7) for i in (1, 2, 3))),
        [*layer("model.layers.0", *ATTENTION, *NORMS, "block_sparse_moe.gate.weight"), *ENDS],
    ),
    "gpt-oss": (
        layer("model.layers.0", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        [
            *layer("model.layers.0", *ATTENTION, *NORMS, "self_attn.q_proj.bias", "self_attn.sinks"),
            *layer("model.layers.0", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
            *layer("model.layers.0", "mlp.router.weight", "mlp.router.bias"),
            *ENDS,
        ],
    ),
    "gpt-oss in mxfp4": (
        [],
        [
            *layer("model.layers.0", "mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"),
            *layer("model.layers.0", "mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"),
            *layer("model.layers.0", "mlp.experts.gate_up_proj_bias", *ATTENTION),
            *ENDS,
        ],
    ),
    "nemotron-h": (
        [
            *layer("backbone.layers.1", "mixer.up_proj.weight", "mixer.down_proj.weight"),
            *layer(
                "backbone.layers.3",
                *(f"mixer.experts.{e}.{p}.weight" for e in (0, 1) for p in ("up_proj", "down_proj")),
            ),
            *layer("backbone.layers.3", "mixer.shared_experts.up_proj.weight", "mixer.shared_experts.down_proj.weight"),
        ],
        [
            *layer(
                "backbone.layers.0", "mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias", "norm.weight"
            ),
            *layer("backbone.layers.0", "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight"),
            *layer("backbone.layers.0", "mixer.out_proj.weight"),
            *layer("backbone.layers.1", "norm.weight"),
            *layer("backbone.layers.2", *(f"mixer.{p}_proj.weight" for p in "qkvo"), "norm.weight"),
            *layer("backbone.layers.3", "mixer.gate.weight", "mixer.gate.e_score_correction_bias"),
            *layer("backbone.layers.3", "mixer.fc1_latent_proj.weight", "mixer.fc2_latent_proj.weight"),
            "backbone.embeddings.weight",
            "backbone.norm_f.weight",
            "lm_head.weight",
        ],
    ),
    "qwen2.5-vl": (
        layer("model.layers.0", *MLP),
        [
            *layer("model.layers.0", *ATTENTION, *NORMS),
            *layer(
                "visual.blocks.0", *MLP, "mlp.gate_proj.bias", "attn.qkv.weight", "attn.proj.weight", "norm1.weight"
            ),
            "visual.merger.mlp.0.weight",
            "visual.merger.ln_q.weight",
            "visual.patch_embed.proj.weight",
            *ENDS,
        ],
    ),
    "idefics3": (
        layer("model.text_model.layers.0", *MLP),
        [
            *layer("model.text_model.layers.0", *ATTENTION, *NORMS),
            *layer("model.vision_model.encoder.layers.0", "mlp.fc1.weight", "mlp.fc2.weight", "mlp.fc1.bias"),
            *layer("model.vision_model.encoder.layers.0", "self_attn.q_proj.weight", "layer_norm1.weight"),
            "model.vision_model.embeddings.position_embedding.weight",
            "model.vision_model.post_layernorm.bias",
            "model.connector.modality_projection.proj.weight",
            "model.text_model.embed_tokens.weight",
            "model.text_model.norm.weight",
            "lm_head.weight",
        ],
    ),
    "qwen3-vl-moe, as transformers 5 names it": (
        layer("model.language_model.layers.0", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        [
            *layer("model.language_model.layers.0", *ATTENTION, *NORMS, "mlp.gate.weight"),
            *layer("model.visual.blocks.0", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "attn.qkv.weight"),
            "model.language_model.embed_tokens.weight",
            "lm_head.weight",
        ],
    ),
    "llama 4": (
        [
            *layer("language_model.model.layers.0", *(f"feed_forward.{name}" for name in GATED)),
            *layer(
                "language_model.model.layers.1", "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"
            ),
            *layer("language_model.model.layers.1", *(f"feed_forward.shared_expert.{name}" for name in GATED)),
        ],
        [
            *layer("language_model.model.layers.1", *ATTENTION, "feed_forward.router.weight"),
            *layer("vision_model.model.layers.0", "mlp.fc1.weight", "mlp.fc2.weight", "mlp.fc1.bias"),
            "language_model.model.embed_tokens.weight",
            "multi_modal_projector.linear_1.weight",
        ],
    ),
    "phi-3 with fused gate and up": (
        layer("model.layers.0", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
        [*layer("model.layers.0", "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", *NORMS), *ENDS],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_feed_forward_projections_of_the_decoder_are_resharded(family: str) -> None:
    reshard, broadcast = FAMILIES[family]
    found = classify([*broadcast, *reshard])
    assert found.reshard == set(reshard)
    assert set(found.verdicts) == {*reshard, *broadcast}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.up_proj.weight", "dense"),
        ("model.layers.3.mlp.experts.1.up_proj.weight", "expert"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared expert"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.3.mlp.experts.0.gate_proj.weight_scale_inv", "quantisation scale"),
        ("model.layers.3.self_attn.kv_b_proj.weight", "attention"),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", "norm"),
        ("model.layers.61.mlp.experts.1.up_proj.weight", "multi-token prediction"),
        ("model.layers.61.shared_head.head.weight", "multi-token prediction"),
        ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "head"),
    ],
)
def test_every_tensor_says_what_it_is(name: str, kind: str) -> None:
    reshard, broadcast = FAMILIES["deepseek-v3"]
    assert classify([*reshard, *broadcast]).verdicts[name].kind == kind


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.down_proj.weight",  # nothing goes up
        "model.layers.0.mlp.adapter.up_proj.weight",  # its down projection is elsewhere
        "model.connector.up_proj.weight",  # no layer
    ],
)
def test_a_suffix_alone_does_not_make_a_projection(name: str) -> None:
    assert classify([name, "model.embed_tokens.weight"]).verdicts[name].route is Route.BROADCAST


def test_a_stack_without_the_token_embedding_is_not_the_decoder() -> None:
    decoder = layer("text.model.layers.0", *MLP)
    other = layer("perceiver.layers.0", *MLP)
    assert classify([*decoder, *other, "text.model.embed_tokens.weight"]).reshard == set(decoder)


def test_a_later_pipeline_stage_classifies_without_the_embedding() -> None:
    names = layer("model.layers.7", *MLP, *ATTENTION)
    assert classify(names).reshard == set(layer("model.layers.7", *MLP))


def test_shapes_tell_stacked_experts_and_refuse_vectors() -> None:
    parameters = [
        LogicalParameter("model.layers.0.mlp.experts.gate_up_proj", (8, 64, 32), "bfloat16"),
        LogicalParameter("model.layers.0.mlp.experts.down_proj", (8, 32, 32), "bfloat16"),
        LogicalParameter("model.layers.1.mlp.up_proj.weight", (64,), "bfloat16"),
        LogicalParameter("model.layers.1.mlp.down_proj.weight", (32, 64), "bfloat16"),
    ]
    verdicts = classify(parameters).verdicts
    assert verdicts["model.layers.0.mlp.experts.gate_up_proj"].kind == "stacked experts"
    assert verdicts["model.layers.1.mlp.up_proj.weight"].route is Route.BROADCAST


def test_rows_total_every_tensor_once() -> None:
    parameters = [
        LogicalParameter("model.embed_tokens.weight", (10, 4), "bfloat16"),
        LogicalParameter("model.layers.0.mlp.up_proj.weight", (8, 4), "bfloat16"),
        LogicalParameter("model.layers.0.mlp.down_proj.weight", (4, 8), "bfloat16"),
        LogicalParameter("model.layers.0.input_layernorm.weight", (4,), "float32"),
    ]
    rows = classify(parameters).rows(parameters)
    assert [(row.route, row.kind, row.tensors, row.bytes) for row in rows] == [
        (Route.RESHARD, "dense", 2, 128),
        (Route.BROADCAST, "embedding", 1, 80),
        (Route.BROADCAST, "norm", 1, 16),
    ]


def test_time_is_linear_in_names() -> None:
    def seconds(layers: int) -> float:
        names = [f"model.layers.{i}.mlp.experts.{e}.{p}" for i in range(layers) for e in range(256) for p in GATED] + [
            "model.embed_tokens.weight"
        ]
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            classify(names)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(16) < 8 * seconds(4)  # a quadratic pass takes 16 times as long
