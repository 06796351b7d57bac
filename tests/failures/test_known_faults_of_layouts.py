"""Faults of a kind that users reported, in layouts and sizes. docs/failures.md lists them all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.region import Region
from refit_transport.planning import Plan, compile_program
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.staging import Staging
from refit_transport.trainers.base import WeightSource
from refit_transport.trainers.dtensor import DTensorSource
from refit_transport.trainers.tensors import TensorSource
from tests.matrix.in_memory_wire import InMemoryWire
from tests.matrix.refits import plan_of

ALL = {"transport": "nccl_reshard", "scope": "all", "bucket_bytes": 4096}


def to_one_engine(held: list[WeightSource], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Plan, TensorSink]:
    """A plan that brings ``weight`` to one inference rank, and its sink; every rank has a domain of its own."""
    sink = TensorSink({"weight": [(Region.whole(shape), torch.zeros(shape, dtype=dtype))]})
    rank = len(held)
    return plan_of(held, {rank: sink}, ALL, tuple((r,) for r in range(rank + 1))), sink


def test_uneven_rows_follow_torch_chunk_as_fsdp_does() -> None:
    """Ten rows over four ranks are 3, 3, 3, 1, as DTensor cuts them, and not 3, 3, 2, 2."""
    full = torch.arange(40.0).view(10, 4)
    held = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            linear = nn.Linear(4, 10, bias=False)
            linear.weight.data.copy_(full)
            fully_shard(linear, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=(f"of rank {rank}",)))
            held.append(DTensorSource(linear))
        finally:
            dist.destroy_process_group()
    rows = [source.holdings()["weight"][0].shape[0] for source in held]
    assert rows == [3, 3, 3, 1]
    plan, sink = to_one_engine(held, (10, 4), torch.float32)
    bindings = {
        rank: Binding(plan, compile_program(plan, rank), held[rank] if rank < 4 else None, sink if rank == 4 else None)
        for rank in plan.world
    }
    InMemoryWire(bindings).run(1)
    assert torch.equal(sink.view("weight", Region.whole((10, 4))), full)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buckets_are_sized_by_the_layout_and_not_by_the_memory_of_the_moment(device: str) -> None:
    shape = (64, 256)
    source = TensorSource({"weight": shape}, {"weight": [(Region.whole(shape), torch.empty(shape, device=device))]})
    plan, _ = to_one_engine([source], shape, torch.float32)
    assert len(plan.buckets) == 64 * 256 * 4 // plan.options.fill_bytes == 32
    program = compile_program(plan, 0)
    assert max(message.nbytes for bucket in program.buckets for message in bucket.sends) <= plan.options.fill_bytes


def test_parameters_that_were_offloaded_after_planning_are_named_and_not_sent_empty() -> None:
    linear = nn.Linear(16, 64, bias=False)
    source = DTensorSource(linear)
    plan, _ = to_one_engine([source], (64, 16), torch.float32)
    binding = Binding(plan, compile_program(plan, 0), source)
    binding.begin(1)
    binding.bind(Staging())
    linear.weight.data = torch.empty(0)
    binding.begin(2)
    with pytest.raises(ValueError, match=r"weight .* on rank 0: planned, but .* offloaded parameters"):
        binding.bind(Staging())


def test_a_view_of_another_dtype_than_planned_is_named_with_both() -> None:
    held = {"weight": [(Region.whole((64, 16)), torch.zeros(64, 16))]}
    source = TensorSource({"weight": (64, 16)}, held)
    plan, _ = to_one_engine([source], (64, 16), torch.float32)
    changed = TensorSource({"weight": (64, 16)}, {"weight": [(Region.whole((64, 16)), torch.zeros(64, 16).bfloat16())]})
    binding = Binding(plan, compile_program(plan, 0), changed)
    with pytest.raises(ValueError, match=r"weight .* rank 0: .* torch.float32, the live tensor has .*bfloat16"):
        binding.bind(Staging())
