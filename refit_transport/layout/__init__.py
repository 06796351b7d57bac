"""Regions, meshes and placements: which rank holds which part of a logical parameter. Pure."""

from .describe import Holding, describe, group_holdings
from .layout import ITEMSIZE, Cell, Entry, Layout, LogicalParameter, SideDescription
from .mesh import Mesh
from .placements import Placement, Replicate, Shard, StridedShard, from_torch
from .region import LayoutError, Region
from .sharding import chunk, local_regions, mesh_layout, region_layout, shard_regions

__all__ = [
    "ITEMSIZE",
    "Cell",
    "Entry",
    "Holding",
    "Layout",
    "LayoutError",
    "LogicalParameter",
    "Mesh",
    "Placement",
    "Region",
    "Replicate",
    "Shard",
    "SideDescription",
    "StridedShard",
    "chunk",
    "describe",
    "from_torch",
    "group_holdings",
    "local_regions",
    "mesh_layout",
    "region_layout",
    "shard_regions",
]
