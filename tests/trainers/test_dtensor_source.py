"""A DTensor source reports, rank by rank, the very bytes that save_pretrained would write, however the model is cut."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from refit_transport.layout.region import Region
from refit_transport.trainers.dtensor import DTensorSource
from tests.models import FAMILIES, make_model, read_checkpoint
from tests.trainers.forked_ranks import run_ranks


def export(source):
    """What a rank's source offers, as plain data: name -> (shape, dtype, [(region, bytes copied from the view)])."""
    shapes = {p.name: (p.shape, p.dtype) for p in source.parameters()}
    return {
        name: (*shapes[name], [(region, source.view(name, region).clone()) for region in regions])
        for name, regions in source.holdings().items()
    }


def assemble(exports):
    """Full tensors from all ranks' exports; every element must be held, and replicas must agree bit for bit."""
    tensors, held = {}, {}
    for part in exports:
        for name, (shape, dtype, regions) in part.items():
            full = tensors.setdefault(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
            seen = held.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            assert full.shape == shape
            for region, value in regions:
                box = region.slices()
                assert value.shape == region.shape and value.dtype == full.dtype
                assert torch.equal(full[box][seen[box]], value[seen[box]]), f"replicas of {name} differ in {region}"
                full[box], seen[box] = value, True
    missing = [name for name, seen in held.items() if not seen.all()]
    assert not missing, missing
    return tensors


def assert_same(tensors, expected):
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype and torch.equal(tensors[name], value), name


def model_class(family):
    return getattr(transformers, FAMILIES[family][1])


def shard_fsdp(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def load_fsdp(path, family, mesh_shape, dtype=torch.float32):
    model = model_class(family).from_pretrained(path, dtype=dtype)
    names = ("dp_replicate", "dp_shard")[-len(mesh_shape) :]
    shard_fsdp(model, init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_fsdp_reassembles_to_its_checkpoint(family, tmp_path):
    path = make_model(family, tmp_path / "made", seed=1)
    loaded = model_class(family).from_pretrained(path, dtype=torch.float32)
    loaded.save_pretrained(tmp_path / "saved")

    def rank_body(rank):
        model = model_class(family).from_pretrained(path, dtype=torch.float32)
        decoders = (getattr(model.model, name, None) for name in ("language_model", "text_model"))
        backbone = next(filter(None, decoders), model.model)
        mesh = init_device_mesh("cpu", (3,))
        for layer in backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        source = DTensorSource(model)
        return export(source), source.aliases

    results = run_ranks(3, rank_body)
    assert_same(assemble([part for part, _ in results]), read_checkpoint(tmp_path / "saved"))
    expected_aliases = {"lm_head.weight": "model.embed_tokens.weight"} if family == "qwen3_tied" else {}
    assert [aliases for _, aliases in results] == [expected_aliases] * 3


def test_hsdp_holds_the_whole_model_once_per_replica(tmp_path):
    path = make_model("qwen3_moe", tmp_path, seed=1, dtype="float32")
    parts = run_ranks(4, lambda rank: export(DTensorSource(load_fsdp(path, "qwen3_moe", (2, 2)))))
    assert_same(assemble(parts[:2]), read_checkpoint(path))
    assert_same(assemble(parts[2:]), read_checkpoint(path))


TP_PLAN = {
    "self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel, "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}  # fmt: skip


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_tensor_parallel_under_fsdp_with_norms_on_sub_meshes(mesh_shape, tmp_path):
    path = make_model("qwen3", tmp_path, seed=1, dtype="float32", intermediate_size=52)

    def rank_body(rank):
        names = ("dp_replicate", "dp_shard", "tp")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        model = model_class("qwen3").from_pretrained(path, dtype=torch.float32)
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], {name: style() for name, style in TP_PLAN.items()})
        shard_fsdp(model, mesh[names[:-1]] if len(names) > 2 else mesh["dp_shard"])
        return export(DTensorSource(model))

    assert_same(assemble(run_ranks(4, rank_body)), read_checkpoint(path))


@pytest.mark.parametrize("rows", [1, 3, 6, 7, 13])
@pytest.mark.parametrize(("plan", "world_size"), [("fsdp", 4), ("fsdp3 x tp2", 6)])
def test_uneven_and_empty_shards_are_read_by_content(rows, plan, world_size):
    def rank_body(rank):
        linear = nn.Linear(8, rows, bias=True)
        with torch.no_grad():
            linear.weight.copy_(torch.arange(rows * 8.0).view(rows, 8))
            linear.bias.copy_(torch.arange(float(rows)))
        model = nn.Sequential(linear)
        if plan == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        else:
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        return export(DTensorSource(model))

    tensors = assemble(run_ranks(world_size, rank_body))
    assert torch.equal(tensors["0.weight"], torch.arange(rows * 8.0).view(rows, 8))
    assert torch.equal(tensors["0.bias"], torch.arange(float(rows)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.arange(6 * 4 * 3.0).view(6, 4, 3))
        self.down = nn.Parameter(torch.arange(6 * 2 * 4.0).view(6, 2, 4))


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "fsdp_dim"),
    [((2, 2), [Shard(0)], 0), ((2, 2), [Shard(0)], 1), ((1, 2, 2), [Shard(0), Shard(1)], 0)],
    ids=["ep x fsdp on experts", "ep x fsdp on rows", "ep x etp x fsdp"],
)
def test_expert_parallel_under_fsdp(mesh_shape, placements, fsdp_dim):
    def rank_body(rank):
        names = ("efsdp", "ep", "etp")[: len(mesh_shape)]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        experts = Experts()
        for name, parameter in list(experts.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh[names[1:]], placements)
            experts.register_parameter(name, nn.Parameter(sharded))
        fully_shard(experts, mesh=mesh["efsdp"], shard_placement_fn=lambda p: Shard(fsdp_dim))
        return export(DTensorSource(experts))

    assert_same(assemble(run_ranks(4, rank_body)), {n: p.detach() for n, p in Experts().named_parameters()})


@pytest.mark.parametrize("tp_placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_fsdp_over_one_spmd_mesh(tp_placement):
    full = torch.arange(6 * 4.0).view(6, 4)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(full, mesh, [Replicate(), tp_placement]))
        fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        placements = tuple(module.weight.placements)
        return export(DTensorSource(module)), placements != (Replicate(), tp_placement)

    results = run_ranks(4, rank_body)
    assert all(sharded for _, sharded in results)
    assert torch.equal(assemble([part for part, _ in results])["weight"], full)


@pytest.mark.parametrize(
    "placements", [[Shard(1), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Replicate()]], ids=str
)
def test_tensors_distributed_by_hand(placements):
    full = torch.arange(7 * 10.0).view(7, 10)

    def rank_body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(full, mesh, placements))
        return export(DTensorSource(module))

    assert torch.equal(assemble(run_ranks(4, rank_body))["weight"], full)


def test_unreduced_tensor_is_refused_with_its_name():
    from torch.distributed.tensor import Partial

    def rank_body(rank):
        module = nn.Module()
        mesh = init_device_mesh("cpu", (2,))
        module.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
        with pytest.raises(ValueError, match=r"weight: placement .*Partial"):
            DTensorSource(module)

    run_ranks(2, rank_body)


def test_views_are_the_live_memory_and_survive_optimizer_steps(tmp_path):
    path = make_model("qwen3_moe", tmp_path, seed=1, dtype="float32")

    def rank_body(rank):
        model = load_fsdp(path, "qwen3_moe", (2,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        source = DTensorSource(model)
        views = {(n, r): source.view(n, r) for n, regions in source.holdings().items() for r in regions}
        before = {key: view.clone() for key, view in views.items()}
        model(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
        optimizer.step()
        moved = source.refresh()
        changed = sum(not torch.equal(views[key], before[key]) for key in views)
        fresh = export(DTensorSource(model))
        current = all(torch.equal(views[n, r], value) for n, (_, _, held) in fresh.items() for r, value in held)
        return moved, changed, len(views), current

    for moved, changed, count, current in run_ranks(2, rank_body):
        assert not moved and current
        assert changed > count // 2


def test_forward_without_backward_leaves_nothing_gathered_in_the_source(tmp_path):
    path = make_model("qwen3", tmp_path, seed=1, dtype="float32", vocab_size=300, hidden_size=128)

    def rank_body(rank):
        model = load_fsdp(path, "qwen3", (2,))
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None])
        assert not isinstance(model.lm_head.weight, DTensor)
        return export(DTensorSource(model))

    parts = run_ranks(2, rank_body)
    assert_same(assemble(parts), read_checkpoint(path))
    assert [region for region, _ in parts[0]["lm_head.weight"][2]] == [Region((0, 0), (150, 128))]


def test_refresh_reports_storage_that_moved():
    model = nn.Linear(4, 4)
    source = DTensorSource(model)
    assert not source.refresh()
    old = source.view("weight", Region((1, 0), (2, 4)))
    model.weight = nn.Parameter(torch.ones(4, 4))
    assert source.refresh()
    assert not torch.equal(source.view("weight", Region((1, 0), (2, 4))), old)


def test_tying_is_read_from_the_live_model_not_from_its_configuration(tmp_path):
    path = make_model("qwen3_tied", tmp_path, seed=1, dtype="float32")
    model = model_class("qwen3_tied").from_pretrained(path)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    source = DTensorSource(model)
    assert source.aliases == {}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(source.holdings())


def test_compiled_and_checkpointed_models_have_clean_names(tmp_path):
    path = make_model("qwen3", tmp_path, seed=1, dtype="float32")
    model = model_class("qwen3").from_pretrained(path)
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert set(DTensorSource(torch.compile(model)).holdings()) == set(read_checkpoint(path))


def test_view_of_what_is_not_held_is_an_error():
    source = DTensorSource(nn.Linear(4, 4))
    with pytest.raises(KeyError, match="missing"):
        source.view("missing", Region((0,), (1,)))
    with pytest.raises(ValueError, match=r"weight: region \[3:5, 0:4\] is not held .* holds \[0:4, 0:4\]"):
        source.view("weight", Region((3, 0), (5, 4)))


def test_transformers_own_parallel_trainer(tmp_path, monkeypatch):
    path = make_model("qwen3_moe", tmp_path, seed=1, dtype="float32")
    monkeypatch.setenv("LOCAL_RANK", "0")

    def rank_body(rank, ep_size):
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=2, fsdp_size=2, ep_size=ep_size)
        model = model_class("qwen3_moe").from_pretrained(path, distributed_config=config, dtype=torch.float32)
        source = DTensorSource(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        first = export(source)
        ids = torch.arange(8)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        source.refresh()
        second = export(source)
        dist.barrier()
        model.save_pretrained(path / f"stepped{ep_size}")
        return first, second

    for ep_size in (1, 2):
        parts = run_ranks(4, rank_body, ep_size)
        assert_same(assemble([first for first, _ in parts]), read_checkpoint(path))
        assert_same(assemble([second for _, second in parts]), read_checkpoint(path / f"stepped{ep_size}"))
