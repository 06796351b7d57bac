"""The pieces of a program as live tensors: which parameter, which region, which dtypes, which view."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refit_transport.engines.base import WeightSink
from refit_transport.layout.region import Region
from refit_transport.planning.plan import Plan
from refit_transport.planning.program import Program
from refit_transport.trainers.base import WeightSource


@dataclass(frozen=True, slots=True)
class Traits:
    """What all pieces of one parameter in one transfer group have in common."""

    name: str
    shape: tuple[int, ...]
    src: torch.dtype
    dst: torch.dtype
    wire: torch.dtype
    whole: bool


class Pieces:
    """Rows of a program's piece table as Python values; indexing a numpy array per row would dominate binding."""

    def __init__(self, plan: Plan, program: Program) -> None:
        table = program.pieces
        self.rank = program.rank
        self.parameter: list[int] = table.parameter.tolist()
        self.nbytes: list[int] = table.nbytes.tolist()
        self.offset: list[int] = table.offset.tolist()
        self.origin: list[int] = table.origin.tolist()
        self.wanted: list[bool] = table.wanted.tolist()
        self._start: list[list[int]] = table.start.tolist()
        self._stop: list[list[int]] = table.stop.tolist()
        group: list[int] = table.group.tolist()
        known = {pair: _traits(plan, *pair) for pair in set(zip(self.parameter, group))}
        self._traits = [known[pair] for pair in zip(self.parameter, group)]

    def traits(self, row: int) -> Traits:
        return self._traits[row]

    def region(self, row: int) -> Region:
        dims = len(self.traits(row).shape)
        return Region(tuple(self._start[row][:dims]), tuple(self._stop[row][:dims]))

    def source_view(self, source: WeightSource, row: int) -> torch.Tensor:
        """The trainer's live tensor for a row. Raises ValueError when it has another shape or dtype than planned, or is
        gone."""
        traits, region = self.traits(row), self.region(row)
        try:
            view = source.view(traits.name, region)
        except KeyError as error:
            raise ValueError(
                f"{traits.name} {region} on rank {self.rank}: planned, but the trainer holds nothing of it now; bring "
                "offloaded parameters back before a refit, or describe the rank again and make a new plan"
            ) from error
        return self._checked(view, traits, region, traits.src)

    def sink_view(self, sink: WeightSink, row: int) -> torch.Tensor:
        """The engine's live tensor for a row. Raises ValueError as ``source_view`` does."""
        traits, region = self.traits(row), self.region(row)
        return self._checked(sink.view(traits.name, region), traits, region, traits.dst)

    def _checked(self, view: torch.Tensor, traits: Traits, region: Region, dtype: torch.dtype) -> torch.Tensor:
        if tuple(view.shape) != region.shape or view.dtype != dtype:
            raise ValueError(
                f"{traits.name} {region} on rank {self.rank}: the plan was made for shape {region.shape} of {dtype}, "
                f"the live tensor has {tuple(view.shape)} of {view.dtype}; describe the rank again and make a new plan"
            )
        return view.detach()


def _traits(plan: Plan, parameter: int, number: int) -> Traits:
    group = plan.groups[number]
    dtypes = [getattr(torch, name) for name in (group.src_dtype, group.dst_dtype, group.wire_dtype)]
    return Traits(plan.parameters[parameter].name, group.shape, *dtypes, group.whole)
