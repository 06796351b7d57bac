"""Which rows or columns of a tensor one rank of a tensor-parallel group holds, by the rules of Megatron and of vLLM."""

from __future__ import annotations

from .tensors import ModelTensor

Interval = tuple[int, int]
MEGATRON_VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to this times the tensor-parallel size."""
VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to this."""


def megatron_intervals(tensor: ModelTensor, rank: int, ranks: int) -> tuple[Interval, ...]:
    """Intervals along ``tensor.cut.dim`` that tensor-parallel rank ``rank`` of ``ranks`` holds in training."""
    cut = tensor.cut
    size = tensor.shape[cut.dim or 0]
    if cut.vocabulary:
        multiple = MEGATRON_VOCABULARY_MULTIPLE * ranks
        return _clip(-(-size // multiple) * multiple // ranks, rank, size)
    if cut.kv_groups and cut.kv_groups < ranks:
        return _inside_groups(tensor, rank, ranks)
    return _even(tensor, rank, ranks)


def vllm_intervals(tensor: ModelTensor, rank: int, ranks: int) -> tuple[Interval, ...]:
    """Intervals along ``tensor.cut.dim`` that tensor-parallel rank ``rank`` of ``ranks`` holds in an engine."""
    cut = tensor.cut
    size = tensor.shape[cut.dim or 0]
    if cut.vocabulary:
        padded = -(-size // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE
        return _clip(-(-padded // ranks), rank, size)
    if cut.units and cut.units < ranks:
        unit = size // cut.units
        first = rank * cut.units // ranks * unit
        return ((first, first + unit),)
    return _even(tensor, rank, ranks)


def chunk_rows(intervals: tuple[Interval, ...], part: int, parts: int) -> tuple[Interval, ...]:
    """FSDP's share ``part`` of ``parts`` of the rows in ``intervals``, cut as ``torch.chunk`` cuts them."""
    rows = sum(stop - start for start, stop in intervals)
    share = -(-rows // parts)
    low, high = min(rows, part * share), min(rows, (part + 1) * share)
    return _window(intervals, low, high)


def _even(tensor: ModelTensor, rank: int, ranks: int) -> tuple[Interval, ...]:
    """The rank's share of each component, cut in equal pieces (the last may be short when the size is odd)."""
    parts = tensor.cut.parts or (tensor.shape[tensor.cut.dim or 0],)
    found, offset = [], 0
    for part in parts:
        share = -(-part // ranks)
        low, high = min(part, rank * share), min(part, (rank + 1) * share)
        if low < high:
            found.append((offset + low, offset + high))
        offset += part
    return tuple(found)


def _inside_groups(tensor: ModelTensor, rank: int, ranks: int) -> tuple[Interval, ...]:
    """q, k and v lie fused group by group, ``[queries of the group, key, value]``, and a rank owns a run of those rows
    that ends inside a group. Returns the rank's rows of this one projection."""
    groups, band = tensor.cut.kv_groups, tensor.cut.band
    sizes = tensor.cut.group_rows
    own, width, origin = sizes[band], sum(sizes), sum(sizes[:band])
    first, last = rank * width * groups // ranks, (rank + 1) * width * groups // ranks
    found = []
    for group in range(groups):
        start = group * width + origin
        low, high = max(first, start), min(last, start + own)
        if low < high:
            found.append((low - start + group * own, high - start + group * own))
    return tuple(found)


def _clip(share: int, rank: int, size: int) -> tuple[Interval, ...]:
    low, high = min(size, rank * share), min(size, (rank + 1) * share)
    return ((low, high),) if low < high else ()


def _window(intervals: tuple[Interval, ...], low: int, high: int) -> tuple[Interval, ...]:
    """Rows ``low`` to ``high`` of the concatenation of ``intervals``."""
    found, offset = [], 0
    for start, stop in intervals:
        first, last = max(low, offset), min(high, offset + stop - start)
        if first < last:
            found.append((start + first - offset, start + last - offset))
        offset += stop - start
    return tuple(found)
