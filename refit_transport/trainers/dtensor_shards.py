"""Which regions of a model tensor its local shard stores, read from the live DTensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from refit_transport.layout.mesh import Mesh
from refit_transport.layout.placements import from_torch
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import local_regions


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of one model tensor. ``boxes`` pair each region of the global tensor with the region of ``local``
    that stores it; there are none when the shard is empty."""

    local: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[tuple[Region, Region], ...]


def read_shard(name: str, tensor: torch.Tensor) -> Shard:
    """The shard behind ``tensor``, a DTensor or a plain tensor (which is whole). Raises ValueError that names it when
    its local shape contradicts its placements."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        whole = Region.whole(shape)
        return Shard(tensor.detach(), shape, () if whole.empty else ((whole, whole),))
    local = tensor.detach().to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Shard(local, shape, ())
    grid = Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh_dim_names or ()))
    try:
        regions = local_regions(shape, grid, coordinate, from_torch(tensor.placements), tuple(local.shape))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return Shard(local, shape, tuple(zip(regions, _local_boxes(regions), strict=True)))


def local_pointer(tensor: torch.Tensor) -> int:
    """Address of the local shard of a DTensor, or of a plain tensor."""
    return tensor.to_local().data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


def _local_boxes(regions: tuple[Region, ...]) -> list[Region]:
    """Where each region lies in the local tensor. ``regions`` are the product, in row-major order, of one list of
    intervals per dimension, and the local tensor holds those intervals one after another."""
    starts: list[dict[tuple[int, int], int]] = []
    for dim in range(len(regions[0].start) if regions else 0):
        intervals = dict.fromkeys((region.start[dim], region.stop[dim]) for region in regions)
        position = 0
        for a, b in intervals:
            intervals[a, b] = position
            position += b - a
        starts.append(intervals)
    boxes = []
    for region in regions:
        corner = tuple(starts[d][a, b] for d, (a, b) in enumerate(zip(region.start, region.stop, strict=True)))
        boxes.append(Region(corner, tuple(c + n for c, n in zip(corner, region.shape, strict=True))))
    return boxes
