"""What a Megatron trainer rank holds, under the names and shapes of the Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import LayoutError, Region
from refit_transport.trainers.tensors import region_view

from .chunk import Chunk
from .fusion import Held
from .names import names_of


class MegatronSource:
    """Implements ``WeightSource`` for ``chunks``, this rank's Megatron-core model: one module, or the list of a virtual
    pipeline, bare or inside DDP and Float16Module.

    ``config`` is that of the checkpoint (a transformers configuration, or the content of ``config.json``); it says the
    family, the size of the vocabulary without padding, and whether embeddings are tied. Everything else is read from
    the live modules: global layer numbers, process groups, expert indices, sizes. Views are strided views of the
    parameters. Raises LayoutError, naming the parameter, for one that has no place in the checkpoint.
    """

    def __init__(self, chunks: nn.Module | Sequence[nn.Module], config: Any) -> None:
        facts = config if isinstance(config, Mapping) else config.to_dict()
        self._wrapped = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
        names = names_of(facts["model_type"])
        self._chunks = [Chunk(chunk, names, facts["vocab_size"]) for chunk in self._wrapped]
        _check_ties(self._chunks, bool(facts.get("tie_word_embeddings")))
        self._pointers: list[tuple[str, int]] = []
        self._held: dict[str, list[Held]] = {}
        self._copies: list[Held] = []
        self.refresh()

    def parameters(self) -> Sequence[LogicalParameter]:
        """Checkpoint tensors of which this rank holds anything, persistent buffers included."""
        return [
            LogicalParameter(name, held[0].shape, str(held[0].view.dtype).removeprefix("torch."))
            for name, held in self._held.items()
        ]

    def holdings(self) -> Mapping[str, tuple[Region, ...]]:
        return {name: tuple(h.region for h in held) for name, held in self._held.items()}

    def view(self, name: str, region: Region) -> torch.Tensor:
        return region_view([(h.region, h.view) for h in self._held[name]], name, region)

    def stored(self) -> Iterator[Held]:
        """Every box in this rank's memory. Those that it stores once more (tied embeddings, and the embedding of
        multi-token prediction) come again: a refit reads the first, whoever loads weights writes all."""
        for held in self._held.values():
            yield from held
        yield from self._copies

    def refresh(self) -> bool:
        """Waits for parameters that the distributed optimizer gathers late, and looks for memory that moved."""
        for chunk in self._wrapped:
            settings = getattr(chunk, "ddp_config", None)
            if settings is not None and settings.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        tensors = [chunk.tensors() for chunk in self._chunks]
        pointers = [(name, t.data_ptr()) for found in tensors for name, t in found.items()]
        if pointers == self._pointers:
            return False
        self._held, self._copies = {}, []
        for chunk, found in zip(self._chunks, tensors, strict=True):
            for name, tensor in found.items():
                for held in chunk.held(name, tensor):
                    self._add(held, name)
        self._pointers = pointers
        return True

    def _add(self, held: Held, where: str) -> None:
        known = self._held.setdefault(held.name, [])
        for other in known:
            if other.region == held.region:
                self._copies.append(held)
                return
            if other.region.intersect(held.region) or other.shape != held.shape:
                raise LayoutError(
                    f"{where}: is {held.region} of {held.name} {held.shape}, and this rank already holds "
                    f"{other.region} of {other.shape}"
                )
        known.append(held)


def _check_ties(chunks: Sequence[Chunk], tied: bool) -> None:
    for chunk in chunks:
        if chunk.tied != tied:
            raise LayoutError(
                f"output_layer.weight: the model has share_embeddings_and_output_weights={chunk.tied}, but the "
                f"checkpoint's tie_word_embeddings is {tied}; build the model with {tied}"
            )
