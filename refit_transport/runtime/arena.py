"""Memory for whole tensors: where the parts of a full checkpoint tensor are put together before its loader reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from refit_transport.planning.whole import Lifetime, lay_out_whole

from .pieces import Traits


@dataclass(frozen=True, slots=True)
class Arrival:
    """First and last bucket in which parts of a tensor arrive, and what kind of tensor it is."""

    first: int
    last: int
    traits: Traits

    @property
    def lifetime(self) -> Lifetime:
        return Lifetime(self.first, self.last, torch.Size(self.traits.shape).numel() * self.traits.dst.itemsize)


class Arena:
    """One tensor per whole parameter, in memory laid out by ``planning.whole``."""

    def __init__(self, arrivals: Mapping[int, Arrival], allocate: Callable[[int], torch.Tensor]) -> None:
        lives = {p: arrival.lifetime for p, arrival in arrivals.items()}
        layout = lay_out_whole(lives)
        self.nbytes = layout.nbytes
        memory = allocate(layout.nbytes) if layout.nbytes else None
        self.tensors: dict[int, torch.Tensor] = {}
        for p, start in layout.starts.items():
            raw, traits = memory[start : start + lives[p].nbytes], arrivals[p].traits
            self.tensors[p] = raw.view(traits.dst).view(traits.shape)
