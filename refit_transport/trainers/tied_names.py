"""Checkpoint names that share memory: tied weights are sent once, under the name that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from refit_transport.trainers.checkpoint_names import CheckpointTensor, checkpoint_tensors


def distinct_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[CheckpointTensor], dict[str, str]]:
    """The checkpoint tensors that ``save_pretrained`` would write, and the other names, mapped to the one they repeat.

    ``tensors`` is a state dict with ``keep_vars=True``: shared tensors are one object in it, whatever the model's
    configuration says. The model only says which of their names a checkpoint keeps.
    """
    owners = _owners(model, tensors)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    written = checkpoint_tensors(model, {name: t for name, t in tensors.items() if name not in ignored})
    kept = {t.pieces: t.name for t in written if all(owners[p.source] == p.source for p in t.pieces)}
    aliases = {}
    for tensor in written:
        original = kept.get(tuple(replace(p, source=owners[p.source]) for p in tensor.pieces), tensor.name)
        if original != tensor.name:
            aliases[tensor.name] = original
    return [t for t in written if t.name not in aliases], aliases


def _owners(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each model tensor, the name under which its memory is sent."""
    dropped = set(getattr(model, "all_tied_weights_keys", None) or ())
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    owners = {}
    for names in groups.values():
        owners |= dict.fromkeys(names, next((name for name in names if name not in dropped), names[0]))
    return owners
