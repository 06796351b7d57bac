"""Writes the trained model as a Hugging Face checkpoint, bucket by bucket, from what the ranks hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region
from refit_transport.rl.policy.checkpoint import replace_directory
from refit_transport.trainers.base import WeightSource
from refit_transport.trainers.dtensor_load import INDEX_FILE

Held = Mapping[str, tuple[LogicalParameter, tuple[Region, ...]]]
BUCKET_BYTES = 1 << 30
"""Rank 0 holds about this much at a time (a single larger tensor is held whole)."""


def save_pretrained(
    source: WeightSource,
    template: str | os.PathLike,
    path: str | os.PathLike,
    dtype_of: Callable[[LogicalParameter], str],
    group: dist.ProcessGroup,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Every rank calls it, after ``source.refresh()``; ``group`` has all of them and moves CPU tensors. Rank 0 writes
    the directory ``path``: all weights, in the dtype that ``dtype_of`` names, and the other files of the checkpoint
    directory ``template`` (configuration, tokenizer). ``path`` appears when it is complete."""
    mine: Held = {p.name: (p, source.holdings()[p.name]) for p in source.parameters()}
    held: list[Held] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(held, mine, group=group)
    rank = dist.get_rank(group)
    partial = Path(f"{path}.partial")
    if rank == 0:
        _copy_other_files(Path(template), partial)
    weight_map: dict[str, str] = {}
    for number, bucket in enumerate(_buckets(held, bucket_bytes)):
        sent = {p.name: _owned(source, p, dtype_of(p), held, rank) for p in bucket}
        received: list[Any] | None = [None] * len(held) if rank == 0 else None
        dist.gather_object(sent, received, group=group)
        if received is not None:
            file = f"model-{number:05d}.safetensors"
            weight_map |= dict.fromkeys((p.name for p in bucket), file)
            _write(partial / file, bucket, received, dtype_of)
    if rank == 0:
        (partial / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        replace_directory(partial, Path(path))
    dist.barrier(group=group)


def _buckets(held: Sequence[Held], limit: int) -> Iterator[list[LogicalParameter]]:
    bucket: list[LogicalParameter] = []
    for parameter in {name: p for part in held for name, (p, _) in part.items()}.values():
        if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _owned(
    source: WeightSource, parameter: LogicalParameter, dtype: str, held: Sequence[Held], rank: int
) -> list[tuple[Region, torch.Tensor]]:
    """The regions that no lower rank sends."""
    name = parameter.name
    lower = {region for part in held[:rank] if name in part for region in part[name][1]}
    regions = held[rank][name][1] if name in held[rank] else ()
    return [(r, source.view(name, r).to("cpu", getattr(torch, dtype))) for r in regions if r not in lower]


def _write(
    file: Path,
    bucket: Sequence[LogicalParameter],
    received: Sequence[Mapping[str, list[tuple[Region, torch.Tensor]]]],
    dtype_of: Callable[[LogicalParameter], str],
) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for parameter in bucket:
        full = tensors[parameter.name] = torch.empty(parameter.shape, dtype=getattr(torch, dtype_of(parameter)))
        for part in received:
            for region, value in part[parameter.name]:
                full[region.slices()] = value
    save_file(tensors, file, metadata={"format": "pt"})


def _copy_other_files(template: Path, partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in template.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin") and file.name != INDEX_FILE:
            shutil.copy(file, partial / file.name)
