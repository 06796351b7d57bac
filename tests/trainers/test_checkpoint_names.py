"""The map from checkpoint tensors to model tensors gives exactly what save_pretrained writes."""

import pytest
import torch
import transformers

from refit_transport.layout.region import Region
from refit_transport.trainers.checkpoint_names import checkpoint_tensors
from tests.models import FAMILIES, make_model, read_checkpoint

MOE_NEMOTRON = {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "n_routed_experts": 4, "n_group": 1,
                "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "moe_shared_expert_intermediate_size": 32}  # fmt: skip
CASES = [*((family, {}) for family in FAMILIES), ("nemotron_h", MOE_NEMOTRON)]


def fused_checkpoint_model():
    """A family whose checkpoint fuses what the model keeps apart."""
    config = transformers.AutoConfig.for_model(
        "hrm_text", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def assemble(tensor, state):
    """A checkpoint tensor put together from its pieces."""
    out = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    for piece in tensor.pieces:
        out[piece.region.slices()] = piece.orient(state[piece.source][piece.source_region.slices()])
    return out


def assert_matches_saved(model, saved):
    state = model.state_dict()
    tensors = {t.name: t for t in checkpoint_tensors(model, state)}
    assert set(saved) <= set(tensors)
    for name, expected in saved.items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(assemble(tensors[name], state), expected), name
    return tensors


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_pieces_reassemble_to_what_save_pretrained_writes(family, overrides, tmp_path):
    path = make_model(family, tmp_path, seed=1, **overrides)
    model = getattr(transformers, FAMILIES[family][1]).from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")  # loading leaves some tensors in float32
    saved = read_checkpoint(tmp_path / "saved")
    tensors = assert_matches_saved(model, saved)
    extra = set(tensors) - set(saved)
    assert extra == ({"lm_head.weight"} if family == "qwen3_tied" else set())


def test_checkpoint_that_fuses_model_tensors_has_one_piece_for_each(tmp_path):
    model = fused_checkpoint_model()
    model.save_pretrained(tmp_path)
    tensors = assert_matches_saved(model, read_checkpoint(tmp_path))
    assert max(len(t.pieces) for t in tensors.values()) > 1


def test_experts_of_a_fused_tensor_are_slices_of_it(tmp_path):
    path = make_model("qwen3_moe", tmp_path, seed=1, moe_intermediate_size=64, hidden_size=128)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tensors = {t.name: t for t in checkpoint_tensors(model, model.state_dict())}
    (piece,) = tensors["model.layers.1.mlp.experts.3.up_proj.weight"].pieces
    assert piece.source == "model.layers.1.mlp.experts.gate_up_proj"
    assert piece.source_region == Region((3, 64, 0), (4, 128, 128))
    assert piece.dims == (1, 2)
    assert piece.to_checkpoint(Region((3, 70, 5), (4, 80, 9))) == Region((6, 5), (16, 9))


def test_sizes_of_one_do_not_confuse_the_dimensions(tmp_path):
    fields = {**FAMILIES["qwen3_moe"][2], "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))
    model.save_pretrained(tmp_path)
    assert_matches_saved(model, read_checkpoint(tmp_path))


def test_conversion_that_permutes_elements_is_refused_with_the_name(monkeypatch, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model("qwen3", tmp_path, seed=1))
    monkeypatch.setattr(
        "transformers.core_model_loading.revert_weight_conversion",
        lambda model, state: {f"saved.{n}": t.reshape(-1)[torch.arange(t.numel())] for n, t in state.items()},
    )
    with pytest.raises(ValueError, match=r"saved\.model\.embed_tokens\.weight: cannot be described by regions"):
        checkpoint_tensors(model, model.state_dict())


def test_other_modules_keep_their_own_names():
    module = torch.nn.Linear(3, 2)
    tensors = checkpoint_tensors(module, module.state_dict())
    assert [t.name for t in tensors] == ["weight", "bias"]
    assert tensors[0].pieces[0].source_region == Region((0, 0), (2, 3))
