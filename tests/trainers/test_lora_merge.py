"""Adapters leave the trainer merged, in float32 and cast once, or not at all with an error that names them."""

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from refit_transport.layout.region import Region
from refit_transport.rl.policy.lora import LoraLinear, add_adapters
from refit_transport.trainers.dtensor import DTensorSource
from tests.models import make_model, read_checkpoint
from tests.trainers.forked_ranks import run_ranks
from tests.trainers.test_dtensor_source import assemble, export

WHOLE = Region((0, 0), (6, 4))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_model("qwen3_moe", tmp_path_factory.mktemp("model"), seed=1, dtype="float32")


def with_peft(path, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"], **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    return adapted


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=["fsdp", "hsdp"])
def test_sharded_peft_model_sends_the_merged_checkpoint(checkpoint, mesh_shape, tmp_path):
    with_peft(checkpoint).merge_and_unload().save_pretrained(tmp_path)
    merged, base = read_checkpoint(tmp_path), read_checkpoint(checkpoint)

    def rank_body(rank):
        model = with_peft(checkpoint)
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return export(DTensorSource(model))

    sent = assemble(run_ranks(len(torch.zeros(mesh_shape).flatten()), rank_body))
    assert set(sent) == set(merged)
    for name, value in merged.items():
        adapted = ".q_proj." in name or ".o_proj." in name
        assert torch.equal(value, base[name]) != adapted
        torch.testing.assert_close(sent[name], value, atol=1e-6 if adapted else 0, rtol=0)


def bare_lora(dtype=torch.float32):
    torch.manual_seed(3)
    module = LoraLinear(nn.Linear(4, 6, bias=False).to(dtype), dim=2, alpha=1.0, seed=0)
    nn.init.normal_(module.lora_B.weight, std=0.01)
    return nn.ModuleDict({"proj": module})


def expected_merge(module):
    return module.weight.float() + module.scale * module.lora_B.weight.float() @ module.lora_A.weight.float()


def test_merge_is_float32_and_cast_once():
    model = bare_lora(torch.bfloat16)
    with torch.no_grad():
        model["proj"].weight.fill_(1.0)
        model["proj"].lora_A.weight.fill_(0.0625)
        model["proj"].lora_B.weight.fill_(0.05)  # each of the two products alone is below half a step of bfloat16 at 1
        model["proj"].scale = 0.75
    sent = DTensorSource(model).view("proj.weight", WHOLE)
    assert sent.dtype == torch.bfloat16
    assert torch.equal(sent, expected_merge(model["proj"]).bfloat16())
    assert torch.all(sent > 1.0)


def test_refresh_merges_again_into_the_same_memory_and_leaves_the_base_alone():
    model = bare_lora()
    base = model["proj"].weight.detach().clone()
    source = DTensorSource(model)
    view = source.view("proj.weight", WHOLE)
    with torch.no_grad():
        model["proj"].lora_B.weight.mul_(-2)
    assert not source.refresh()
    torch.testing.assert_close(view, expected_merge(model["proj"]).detach())
    assert torch.equal(model["proj"].weight, base)
    assert set(source.holdings()) == {"proj.weight"}


class Parametrization(nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(2, 4))
        self.lora_B = nn.Parameter(torch.randn(6, 2))
        self.scaling = 0.5

    def forward(self, weight):
        return weight + self.scaling * self.lora_B @ self.lora_A


def test_parametrized_weight_is_sent_as_the_module_computes_it():
    linear = nn.Linear(4, 6)
    parametrize.register_parametrization(linear, "weight", Parametrization())
    source = DTensorSource(linear)
    torch.testing.assert_close(source.view("weight", WHOLE), linear.weight.detach())
    assert set(source.holdings()) == {"weight", "bias"}


def test_only_the_active_unmerged_peft_adapters_count(checkpoint):
    model = with_peft(checkpoint)
    name, region = "model.layers.0.self_attn.q_proj.weight", Region((0, 0), (128, 128))
    base = read_checkpoint(checkpoint)[name]
    merged = DTensorSource(model).view(name, region)
    assert not torch.equal(merged, base)
    with model.disable_adapter():
        assert torch.equal(DTensorSource(model).view(name, region), base)
    model.merge_adapter()
    torch.testing.assert_close(DTensorSource(model).view(name, region), merged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"adapter on .*q_proj: LoRA variants such as DoRA"),
        ({"lora_bias": True}, r"adapter on .*q_proj: lora_bias cannot be merged"),
        ({"target_modules": ["embed_tokens"]}, r"adapter on .*embed_tokens: LoRA on Embedding"),
        (
            {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
            r"adapter on .*experts: LoRA on Qwen3MoeExperts",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_peft_adapters_that_cannot_be_merged_are_refused_by_name(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        DTensorSource(with_peft(checkpoint, **options))


def test_modules_that_peft_trains_whole_are_sent_in_place_of_the_originals(checkpoint):
    model = with_peft(checkpoint, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.zero_()
    source = DTensorSource(model)
    assert set(source.holdings()) == set(read_checkpoint(checkpoint))
    assert not source.view("lm_head.weight", next(iter(source.holdings()["lm_head.weight"]))).any()


def test_tensors_that_look_like_an_adapter_are_refused_by_name():
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.lora_down = nn.Parameter(torch.zeros(2, 4))

    with pytest.raises(ValueError, match=r"unknown structure: proj\.lora_down"):
        DTensorSource(nn.ModuleDict({"proj": Odd()}))
    linear = nn.Linear(4, 6)
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"parametrization parametrizations\.weight\.0 \(Identity\) is not LoRA"):
        DTensorSource(linear)


def test_adapters_start_without_effect_and_are_all_that_is_trained(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.arange(6)[None]
    before = model(input_ids=ids).logits
    add_adapters(model, {"dim": 4, "alpha": 8, "target_modules": ["*.q_proj", "lm_head"]})
    assert torch.equal(model(input_ids=ids).logits, before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"model.layers.{i}.self_attn.q_proj.lora_{s}.weight" for i in (0, 1) for s in "AB"}
    with pytest.raises(ValueError, match="match no linear layer"):
        add_adapters(model, {"target_modules": ["nothing"]})
