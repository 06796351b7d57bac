"""Fills a sharded model from a Hugging Face checkpoint: every rank reads only the bytes it holds.

The table that says which bytes of the checkpoint a rank sends at a refit says as well which ones it reads at the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refit_transport.layout.region import Region
from refit_transport.trainers.checkpoint_names import CheckpointTensor
from refit_transport.trainers.dtensor_shards import read_shard

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device; buffers are real, because no checkpoint has those
    that a module computes."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives memory on ``device`` to the parameters without; their content is undefined. Buffers keep theirs, and tied
    parameters stay tied."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    swap = torch.__future__.get_swap_module_params_on_conversion()
    # Swapping keeps the parameter objects, hence the ties between modules.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


class CheckpointFiles:
    """The safetensors files of a checkpoint directory, opened when first read."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._open: dict[str, Any] = {}
        index = self._directory / INDEX_FILE
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (self._directory / SINGLE_FILE).exists():
            self._file_of = dict.fromkeys(self._opened(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            self._file_of = {}

    def has_all(self, written: Sequence[CheckpointTensor]) -> bool:
        """Whether every tensor is there under its name and with its shape."""
        return all(self.shape(t.name) == t.shape for t in written)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """The elements of ``region``, read from disk."""
        file = self._opened(self._file_of[name])
        return file.get_slice(name)[region.slices()] if region.start else file.get_tensor(name)

    def names(self) -> Sequence[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None when the files have none of that name."""
        if name not in self._file_of:
            return None
        return tuple(self._opened(self._file_of[name]).get_slice(name).get_shape())

    def _opened(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(self._directory / file, framework="pt")
        return self._open[file]


@torch.no_grad()
def load_shards(
    files: CheckpointFiles, written: Sequence[CheckpointTensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Reads this rank's part of ``tensors``, the live state dict that ``written`` was derived from. A cast to the
    model's dtype is done on the way. Names that are not in ``tensors`` are skipped."""
    shards = {name: read_shard(name, tensor) for name, tensor in tensors.items()}
    for tensor in written:
        for piece in tensor.pieces:
            if piece.source in shards:
                for region, view in piece.held(shards[piece.source].boxes, shards[piece.source].local):
                    view.copy_(files.read(tensor.name, region))


@torch.no_grad()
def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Writes this rank's part of ``full``, which every rank computes alike."""
    shard = read_shard("tensor", tensor)
    for held, local in shard.boxes:
        shard.local[local.slices()].copy_(full[held.slices()])
