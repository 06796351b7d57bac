"""The regions computed for every rank are what a real DTensor holds there, by content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from refit_transport.layout import LayoutError, Mesh, Region, from_torch, local_regions, shard_regions

torch.set_num_threads(1)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """A process group whose collectives do nothing: sharding from a full tensor on every rank needs none."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def real_shard(full: torch.Tensor, mesh: Mesh, rank: int, placements: Sequence[object]) -> torch.Tensor:
    with as_rank(mesh.ranks.index(rank), len(mesh.ranks)):
        device_mesh = DeviceMesh("cpu", torch.arange(len(mesh.ranks)).reshape(mesh.shape))
        return distribute_tensor(full, device_mesh, placements, src_data_rank=None).to_local()


def assembled(full: torch.Tensor, regions: Sequence[Region]) -> torch.Tensor:
    """The local tensor whose regions these are, in local order: row-major over the intervals of each dimension."""
    local = full
    for dim in range(full.ndim):
        intervals = dict.fromkeys((region.start[dim], region.stop[dim]) for region in regions)
        parts = [local.narrow(dim, a, b - a) for a, b in intervals]
        local = torch.cat(parts, dim) if parts else local.narrow(dim, 0, 0)
    return local


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, list[object]]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 7, 8, 13]), max_size=5)))
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (2, 1, 3), (2, 2, 2)]))
    ranks = draw(st.permutations(range(10)))[: prod(sizes)]
    kinds = [st.just(Replicate())]
    if shape:
        dims = st.integers(-len(shape), len(shape) - 1)
        kinds += [st.builds(Shard, dims)] * 2
        kinds.append(st.builds(lambda d, f: _StridedShard(d % len(shape), split_factor=f), dims, st.integers(1, 4)))
    return shape, Mesh(sizes, tuple(ranks)), [draw(st.one_of(kinds)) for _ in sizes]


@settings(max_examples=50, deadline=None)
@given(sharded())
def test_regions_are_what_distribute_tensor_gives_each_rank(
    case: tuple[tuple[int, ...], Mesh, list[object]],
) -> None:
    shape, mesh, placements = case
    full = torch.arange(prod(shape)).reshape(shape)
    for rank, coordinate in mesh:
        local = real_shard(full, mesh, rank, placements)
        regions = shard_regions(shape, mesh, coordinate, from_torch(placements))
        assert sum(region.numel for region in regions) == local.numel()
        if local.numel():
            assert torch.equal(assembled(full, regions), local), (rank, regions)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_fsdp_over_tp_chunks_what_tensor_parallelism_left(rows: int, fsdp: int, tp: int, trailing: bool) -> None:
    shape = (rows, 3) if trailing else (rows,)
    full = torch.arange(prod(shape)).reshape(shape)
    mesh = Mesh.arange((fsdp, tp))
    placements = from_torch([_StridedShard(0, split_factor=tp), Shard(0)])
    for _, (f, t) in mesh:
        parts = full.chunk(tp) if rows else ()
        after_tp = parts[t] if t < len(parts) else full[:0]
        parts = after_tp.chunk(fsdp) if len(after_tp) else ()
        local = parts[f] if f < len(parts) else full[:0]
        regions = local_regions(shape, mesh, (f, t), placements, local.shape)
        assert torch.equal(assembled(full, regions), local) or not local.numel()
        assert sum(region.numel for region in regions) == local.numel()


@pytest.mark.parametrize("rows", [7, 13])
def test_meanings_of_strided_shards_differ_on_uneven_rows_and_the_local_shape_decides(rows: int) -> None:
    mesh, placements = Mesh.arange((3, 2)), from_torch([_StridedShard(0, split_factor=2), Shard(0)])
    differing = 0
    for _, coordinate in mesh:
        literal = shard_regions((rows,), mesh, coordinate, placements)
        fsdp = shard_regions((rows,), mesh, coordinate, placements, fsdp_over_tp=True)
        for regions in (literal, fsdp):
            length = sum(region.numel for region in regions)
            assert local_regions((rows,), mesh, coordinate, placements, (length,)) == regions
        differing += literal != fsdp
    assert differing == 2


def test_packed_gate_and_up_is_read_literally() -> None:
    """transformers marks packed columns with the same placement; no later mesh dimension cuts them."""
    mesh, placements = Mesh.arange((2, 2)), from_torch([Shard(0), _StridedShard(1, split_factor=2)])
    regions = local_regions((4, 8), mesh, (0, 1), placements, (2, 4))
    assert regions == (Region((0, 2), (2, 4)), Region((0, 6), (2, 8)))


def test_a_local_shape_that_no_meaning_gives_is_refused_with_what_was_expected() -> None:
    mesh, placements = Mesh.arange((3, 2)), from_torch([_StridedShard(0, split_factor=2), Shard(0)])
    with pytest.raises(LayoutError, match=r"local shape \(5,\).*global shape \(7,\).*expected \(0,\) or \(1,\)"):
        local_regions((7,), mesh, (2, 0), placements, (5,))
