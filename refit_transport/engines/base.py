"""What an inference rank offers to a refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region


@dataclass(frozen=True)
class SinkDescription:
    """What one inference rank needs, by checkpoint name."""

    direct: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    """Regions that are written straight into the rank's tensors."""
    whole: frozenset[str] = frozenset()
    """Names whose full tensor goes through the model's own loader."""
    ignored: frozenset[str] = frozenset()
    """Names this rank holds nothing of (another pipeline stage, a foreign expert)."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """dtype in this rank's memory, for every name in ``direct`` or ``whole``."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a name is in ``whole`` although it was asked to go directly."""
    left_out: frozenset[str] = frozenset()
    """Tensors of the rank's draft model, as ``draft.<path>``, that no trainer tensor writes: they keep their values."""


class WeightSink(Protocol):
    """One inference rank. The order of calls in a refit is begin, (view, arrived)*, commit; or abort at any point."""

    transient: frozenset[str]
    """Direct names, known once described, whose views live only from the moment they are asked for until the name is
    complete. Their pieces are staged, and a view is asked for at each copy. Views of all other names stay valid."""

    def describe(self, parameters: Sequence[LogicalParameter], direct: frozenset[str]) -> SinkDescription:
        """Where each checkpoint tensor lands on this rank. ``direct`` names the tensors that should go shard to shard;
        any that cannot is returned in ``whole`` with its reason. Raises ValueError when a tensor of the engine would be
        left unwritten, with the names; only a draft model may have such tensors."""

    def begin(self, version: int) -> bool:
        """Open a refit. Returns True when the views of the previous refit are no longer valid."""

    def view(self, name: str, region: Region) -> torch.Tensor:
        """Writable tensor of shape ``region.shape`` (any strides), in this rank's dtype, for a region in ``direct``."""

    def arrived(self, direct: Sequence[str], whole: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Called after each bucket: names in ``direct`` are now complete on this rank; each tensor in ``whole`` is a
        full checkpoint tensor, valid only during the call."""

    def commit(self, version: int) -> None:
        """All bytes landed: finish loading, refresh derived tensors. The engine is FRESH(version) afterwards."""

    def abort(self) -> None:
        """Leave the engine in a state that cannot crash it. It is STALE until the next commit."""
