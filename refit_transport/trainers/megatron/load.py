"""Fills a Megatron model from a Hugging Face checkpoint: every rank reads only the bytes it holds."""

from __future__ import annotations

import torch

from refit_transport.trainers.dtensor_load import CheckpointFiles

from .source import MegatronSource


@torch.no_grad()
def load_checkpoint(source: MegatronSource, files: CheckpointFiles) -> None:
    """Writes every box of the source's model, further copies included, with a cast to the model's dtype on the way.
    What has no place in a checkpoint (padding of the vocabulary) keeps its content. Raises ValueError for a tensor that
    the checkpoint lacks or has in another shape."""
    for held in source.stored():
        found = files.shape(held.name)
        if found != held.shape:
            raise ValueError(f"{held.name}: the checkpoint has shape {found}, the Megatron model needs {held.shape}")
        held.view.copy_(files.read(held.name, held.region))
