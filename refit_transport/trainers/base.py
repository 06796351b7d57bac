"""What a trainer rank offers to a refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region


class WeightSource(Protocol):
    """One trainer rank's holdings, by checkpoint name. Implementations read real objects (DTensor placements, Megatron
    parameter attributes), never configured sizes."""

    def parameters(self) -> Sequence[LogicalParameter]:
        """Checkpoint tensors of which this rank holds anything: global shape, and the dtype they have in memory."""

    def holdings(self) -> Mapping[str, tuple[Region, ...]]:
        """Disjoint, non-empty regions held by this rank, per checkpoint name."""

    def view(self, name: str, region: Region) -> torch.Tensor:
        """Local tensor of shape ``region.shape`` (any strides) that stores ``region``, which lies inside one of the
        rank's holdings. The view stays valid until ``refresh`` says otherwise. Raises KeyError for a foreign name and
        ValueError for a region that is not held."""

    def refresh(self) -> bool:
        """Called before each refit, on every trainer rank. Makes the views current (gathers nothing; merges adapters if
        there are any). Returns True when storage moved, so that views must be taken again."""
