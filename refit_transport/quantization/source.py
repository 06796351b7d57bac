"""A weight source that offers another source's projections in FP8, with their scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region
from refit_transport.trainers.base import WeightSource
from refit_transport.trainers.tensors import region_view

from .blocks import quantize
from .formats import VALUES, BlockFormat, is_projection


@dataclass(frozen=True, slots=True)
class _Shard:
    """One held region of a weight and the memory that its quantised form is kept in."""

    region: Region
    scale_region: Region
    values: torch.Tensor
    scales: torch.Tensor


class QuantizedSource:
    """Implements ``WeightSource`` over ``source``. Tensors that ``chosen`` accepts are offered as FP8 values and, under
    the checkpoint's name for them, scales; all others as they are. Both belong to the same version.

    ``refresh`` quantises this rank's shards from their present contents, into memory that is kept: one byte per element
    besides the trainer's own. Describing the rank raises LayoutError, naming the parameter, where a shard cuts a block.
    """

    def __init__(
        self,
        source: WeightSource,
        form: BlockFormat,
        chosen: Callable[[LogicalParameter], bool] = is_projection,
    ) -> None:
        self._source, self._form, self._chosen = source, form, chosen
        self._shards: dict[str, list[_Shard]] = {}

    def parameters(self) -> Sequence[LogicalParameter]:
        """The source's parameters, each quantised one followed by its scales."""
        listed = []
        for parameter in self._source.parameters():
            if self._chosen(parameter):
                listed.append(LogicalParameter(parameter.name, parameter.shape, VALUES))
                listed.append(self._form.scales_of(parameter))
            else:
                listed.append(parameter)
        return listed

    def holdings(self) -> Mapping[str, tuple[Region, ...]]:
        held = dict(self._source.holdings())
        for parameter in filter(self._chosen, self._source.parameters()):
            held[parameter.name + self._form.suffix] = tuple(
                self._form.scale_region(parameter.name, parameter.shape, region) for region in held[parameter.name]
            )
        return held

    def view(self, name: str, region: Region) -> torch.Tensor:
        if name in self._shards:
            return region_view([(s.region, s.values) for s in self._shards[name]], name, region)
        weight = name.removesuffix(self._form.suffix)
        if weight in self._shards:
            return region_view([(s.scale_region, s.scales) for s in self._shards[weight]], name, region)
        return self._source.view(name, region)

    def refresh(self) -> bool:
        """Quantises anew. Raises ValueError that names weights with infinities or NaNs."""
        moved = self._source.refresh()
        chosen = [parameter for parameter in self._source.parameters() if self._chosen(parameter)]
        held = self._source.holdings()
        moved |= self._keep_memory(chosen, held)
        finite = {
            parameter.name: [self._quantize(parameter.name, shard) for shard in self._shards[parameter.name]]
            for parameter in chosen
        }
        flags = [flag for found in finite.values() for flag in found]
        if flags and not bool(torch.stack(flags).all()):
            bad = [name for name, found in finite.items() if not all(map(bool, found))]
            raise ValueError(f"{self._form.name}: not finite: {', '.join(bad[:5])} ({len(bad)} in all)")
        return moved

    def _quantize(self, name: str, shard: _Shard) -> torch.Tensor:
        return quantize(self._source.view(name, shard.region), self._form, shard.values, shard.scales)

    def _keep_memory(self, chosen: Sequence[LogicalParameter], held: Mapping[str, tuple[Region, ...]]) -> bool:
        """Memory for every shard that has none yet; whether any is new or gone."""
        known, self._shards = self._shards, {}
        for parameter in chosen:
            shards = known.get(parameter.name, [])
            regions = held[parameter.name]
            if tuple(shard.region for shard in shards) != regions:
                shards = [self._new_shard(parameter, region) for region in regions]
            self._shards[parameter.name] = shards
        return known.keys() != self._shards.keys() or any(known[n] is not s for n, s in self._shards.items())

    def _new_shard(self, parameter: LogicalParameter, region: Region) -> _Shard:
        scale_region = self._form.scale_region(parameter.name, parameter.shape, region)
        device = self._source.view(parameter.name, region).device
        values = torch.empty(region.shape, dtype=getattr(torch, VALUES), device=device)
        scales = torch.empty(scale_region.shape, dtype=getattr(torch, self._form.scale_dtype), device=device)
        return _Shard(region, scale_region, values, scales)
