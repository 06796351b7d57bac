"""A weight source for models of DTensors and plain tensors: FSDP2, HSDP, tensor and expert parallel, in any mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region
from refit_transport.trainers.dtensor_shards import Shard, local_pointer, read_shard
from refit_transport.trainers.lora import LowRank, gather, merge, read_adapters
from refit_transport.trainers.tied_names import distinct_tensors


@dataclass(frozen=True, slots=True)
class _Holding:
    region: Region
    """In coordinates of the checkpoint tensor."""
    view: torch.Tensor


class DTensorSource:
    """What this rank holds of ``model`` under the names and shapes of its Hugging Face checkpoint.

    Everything is read from the live tensors: placements, local shapes, which names share memory. Works for transformers
    models (also inside peft or torch.compile) and, with the module's own names, for any other. LoRA adapters are merged
    into buffers as large as this rank's adapted shards. Making a source, and ``refresh``, re-shard what a forward pass
    left gathered and gather adapters, so every rank of the model's meshes must call them at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.aliases: dict[str, str] = {}
        """Checkpoint names that are not sent, because they share memory with the name they map to (tied weights)."""
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._merged: dict[str, torch.Tensor] = {}
        self._seen: dict[str, tuple[torch.Tensor, int, Shard]] = {}
        self._adapted: frozenset[str] = frozenset()
        self._parameters: dict[str, LogicalParameter] = {}
        self._holdings: dict[str, tuple[_Holding, ...]] = {}
        self.refresh()

    def parameters(self) -> Sequence[LogicalParameter]:
        """Checkpoint tensors of which this rank holds anything, tied ones once, persistent buffers included."""
        return [self._parameters[name] for name in self._holdings]

    def holdings(self) -> Mapping[str, tuple[Region, ...]]:
        """Disjoint, non-empty regions held by this rank, per checkpoint name."""
        return {name: tuple(h.region for h in held) for name, held in self._holdings.items()}

    def view(self, name: str, region: Region) -> torch.Tensor:
        """The local memory of ``region``: slices and permutations of the shard, never a copy. Raises KeyError for a
        name this rank does not hold and ValueError for a region outside its holdings."""
        for holding in self._holdings[name]:
            if holding.region.contains(region):
                return holding.view[region.relative_to(holding.region).slices()]
        held = ", ".join(str(h.region) for h in self._holdings[name])
        raise ValueError(f"{name}: region {region} is not held by this trainer rank, which holds {held}")

    @torch.no_grad()
    def refresh(self) -> bool:
        """Re-shards what a forward pass left gathered and merges adapters. True when memory moved since the last call,
        so that views must be taken again."""
        state = {k: v for k, v in self._model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
        adapted = read_adapters(self._model, state)
        tensors = {name: state[key] for key, name in adapted.names.items()}
        moved = self._look(tensors) or self._adapted != frozenset(adapted.low_rank)
        shards = {name: shard for name, (_, _, shard) in self._seen.items()}
        shards |= {name: self._merge(name, shards[name], parts) for name, parts in adapted.low_rank.items()}
        if moved:
            self._adapted = frozenset(adapted.low_rank)
            self._read(tensors, shards)
        return moved

    def _look(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Reads the shards of tensors that are new or moved; whether there were any, or some are gone."""
        moved = self._seen.keys() != tensors.keys()
        seen = {}
        for name, tensor in tensors.items():
            known = self._seen.get(name)
            pointer = local_pointer(tensor)
            if known is None or known[0] is not tensor or known[1] != pointer:
                known, moved = (tensor, pointer, read_shard(name, tensor)), True
            seen[name] = known
        self._seen = seen
        return moved

    def _merge(self, name: str, shard: Shard, adapters: tuple[LowRank, ...]) -> Shard:
        whole = gather(adapters)
        out = self._merged.get(name)
        if out is None or out.shape != shard.local.shape or out.dtype != shard.local.dtype:
            out = self._merged[name] = torch.empty_like(shard.local, requires_grad=False)
        merge(out, shard.local, shard.boxes, whole)
        return Shard(out, shard.shape, shard.boxes)

    def _read(self, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> None:
        written, self.aliases = distinct_tensors(_transformers_model(self._model), tensors)
        self._parameters, self._holdings = {}, {}
        for tensor in written:
            parts = ((piece, shards[piece.source]) for piece in tensor.pieces)
            held = tuple(_Holding(*h) for piece, shard in parts for h in piece.held(shard.boxes, shard.local))
            if held:
                dtype = str(held[0].view.dtype).removeprefix("torch.")
                self._parameters[tensor.name] = LogicalParameter(tensor.name, tensor.shape, dtype)
                self._holdings[tensor.name] = held


def _transformers_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model; else the module itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
