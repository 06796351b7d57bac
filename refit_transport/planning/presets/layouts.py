"""Describes both sides of a refit from sizes alone: which joint rank holds which region of every checkpoint tensor.

Layouts are interned: a model of 250,000 tensors on 2,048 ranks has a few thousand layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from refit_transport.layout.layout import Cell, Entry, Layout, SideDescription
from refit_transport.layout.region import Region

from .clusters import Cluster
from .intervals import Interval, chunk_rows, megatron_intervals, vllm_intervals
from .models import Model
from .parallel import Generation, Training
from .tensors import EMBEDDING, HEAD, ModelTensor

Holdings = dict[Region, list[int]]
Intervals = Callable[[ModelTensor, int, int], tuple[Interval, ...]]


def describe_training(model: Model, sizes: Training, first_rank: int = 0) -> SideDescription:
    """What the trainer ranks ``[first_rank, first_rank + sizes.world)`` hold.

    Raises:
        ValueError: the experts do not divide over ``ep``, or there are fewer layers than pipeline chunks.
    """
    _check(model, sizes.ep, sizes.pp * sizes.vpp, "--train")
    if sizes.fsdp:
        return _intern(model, lambda tensor: _fsdp_holdings(tensor, model.experts, sizes, first_rank), _fsdp_key)
    stage_of = _pipeline_stages(model.layers, sizes.pp, sizes.vpp)
    per_rank = model.experts // sizes.ep if model.experts else 0

    def key(tensor: ModelTensor) -> tuple[object, ...]:
        owner = tensor.expert // per_rank if tensor.expert >= 0 else -1
        return tensor.shape, tensor.cut, stage_of(tensor.layer), owner

    def holdings(tensor: ModelTensor) -> Holdings:
        stage = first_rank + stage_of(tensor.layer) * sizes.tp * sizes.cp * sizes.replicas
        if tensor.expert < 0:
            ranks = [[stage + t + sizes.tp * i for i in range(sizes.cp * sizes.replicas)] for t in range(sizes.tp)]
        else:
            width = sizes.expert_tp
            block = stage + width * (tensor.expert // per_rank)
            copies = sizes.tp * sizes.cp * sizes.replicas // (width * sizes.ep)
            ranks = [[block + x + width * sizes.ep * i for i in range(copies)] for x in range(width)]
        return _cut(tensor, ranks, megatron_intervals)

    return _intern(model, _with_tied_head(model, sizes.pp, holdings), key)


def describe_generation(model: Model, sizes: Generation, first_rank: int = 0) -> SideDescription:
    """What the inference ranks ``[first_rank, first_rank + sizes.world)`` hold, engine after engine.

    Raises:
        ValueError: there are fewer experts than ``ep``, or fewer layers than pipeline stages.
    """
    _check(model, 1, sizes.pp, "--gen")
    stage_of = _engine_stages(model.layers, sizes.pp)
    engine = sizes.tp * sizes.pp

    def owner(tensor: ModelTensor) -> int:
        return _expert_owner(tensor.expert, model.experts, sizes.ep) if sizes.ep > 1 and tensor.expert >= 0 else -1

    def holdings(tensor: ModelTensor) -> Holdings:
        stage = first_rank + stage_of(tensor.layer) * sizes.tp
        if owner(tensor) < 0:
            return _cut(tensor, [[stage + t + engine * d for d in range(sizes.dp)] for t in range(sizes.tp)],
                        vllm_intervals)  # fmt: skip
        group = sizes.ep // sizes.tp
        d, t = divmod(owner(tensor), sizes.tp)
        ranks = [stage + t + engine * (d + group * i) for i in range(sizes.dp // group)]
        return {Region.whole(tensor.shape): ranks}

    return _intern(
        model,
        _with_tied_head(model, sizes.pp, holdings),
        lambda tensor: (tensor.shape, tensor.cut, stage_of(tensor.layer), owner(tensor)),
    )


def _with_tied_head(
    model: Model, stages: int, holdings: Callable[[ModelTensor], Holdings]
) -> Callable[[ModelTensor], Holdings]:
    """``holdings``, and the last pipeline stage's own copy of an embedding that is its output head as well."""
    if stages == 1 or not model.config.get("tie_word_embeddings", False):
        return holdings

    def with_head(tensor: ModelTensor) -> Holdings:
        found = holdings(tensor)
        if tensor.layer == EMBEDDING:
            for region, ranks in holdings(replace(tensor, layer=HEAD)).items():
                found.setdefault(region, []).extend(ranks)
        return found

    return with_head


def domains_for(
    cluster: Cluster, trainers: int, generators: int, colocated: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Ranks by fast-link domain. Each side starts on a domain of its own; colocated sides share ranks from 0."""
    if colocated:
        return _chunks(0, max(trainers, generators), cluster.domain_ranks)
    return (*_chunks(0, trainers, cluster.domain_ranks), *_chunks(trainers, generators, cluster.domain_ranks))


def _chunks(first: int, count: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(a, min(first + count, a + size))) for a in range(first, first + count, size))


def _intern(
    model: Model, holdings: Callable[[ModelTensor], Holdings], key: Callable[[ModelTensor], tuple[object, ...]]
) -> SideDescription:
    """One layout per distinct ``key``; tensors that share it share the layout."""
    numbers: dict[tuple[object, ...], int] = {}
    of_layout: dict[Layout, int] = {}
    entries = []
    for tensor in model.tensors:
        of = key(tensor)
        number = numbers.get(of)
        if number is None:
            cells = tuple(sorted(Cell(region, tuple(sorted(ranks))) for region, ranks in holdings(tensor).items()))
            number = numbers[of] = of_layout.setdefault(Layout(tensor.shape, cells), len(of_layout))
        entries.append(Entry(tensor.name, tensor.dtype, number))
    return SideDescription(tuple(of_layout), tuple(entries))


def _cut(tensor: ModelTensor, ranks: list[list[int]], intervals: Intervals) -> Holdings:
    """Regions of the tensor-parallel positions, whose ranks are listed in order; equal regions are joined."""
    if tensor.cut.dim is None:
        return {Region.whole(tensor.shape): [rank for group in ranks for rank in group]}
    found: Holdings = {}
    for position, group in enumerate(ranks):
        for interval in intervals(tensor, position, len(ranks)):
            found.setdefault(_slab(tensor.shape, tensor.cut.dim, interval), []).extend(group)
    return found


def _slab(shape: tuple[int, ...], dim: int, interval: Interval) -> Region:
    start, stop = list(Region.whole(shape).start), list(shape)
    start[dim], stop[dim] = interval
    return Region(tuple(start), tuple(stop))


def _fsdp_key(tensor: ModelTensor) -> tuple[object, ...]:
    return tensor.shape, tensor.cut, tensor.expert


def _fsdp_holdings(tensor: ModelTensor, experts: int, sizes: Training, first_rank: int) -> Holdings:
    """Tensor parallelism first, then FSDP chunks the local rows; experts are stacked, so whole experts are chunked."""
    found: Holdings = {}
    for shard in range(sizes.fsdp):
        for t in range(sizes.tp):
            ranks = [first_rank + t + sizes.tp * (shard + sizes.fsdp * d) for d in range(sizes.replicas)]
            for region in _fsdp_regions(tensor, experts, sizes, shard, t):
                found.setdefault(region, []).extend(ranks)
    return found


def _fsdp_regions(tensor: ModelTensor, experts: int, sizes: Training, shard: int, t: int) -> list[Region]:
    cut = tensor.cut.dim
    intervals = megatron_intervals(tensor, t, sizes.tp) if cut is not None else ((0, tensor.shape[0]),)
    if tensor.expert >= 0:
        mine = tensor.expert // -(-experts // sizes.fsdp) == shard
        return [_slab(tensor.shape, cut or 0, interval) for interval in intervals] if mine else []
    if cut is None or cut == 0:
        return [_slab(tensor.shape, 0, interval) for interval in chunk_rows(intervals, shard, sizes.fsdp)]
    columns = [_slab(tensor.shape, cut, interval) for interval in intervals]
    rows = [_slab(tensor.shape, 0, interval) for interval in chunk_rows(((0, tensor.shape[0]),), shard, sizes.fsdp)]
    return [both for a in rows for b in columns if (both := a.intersect(b))]


def _pipeline_stages(layers: int, stages: int, chunks: int) -> Callable[[int], int]:
    """Megatron's stages: layers in ``stages * chunks`` runs, run i on stage ``i % stages``; the first runs are longer
    when the layers do not divide."""
    runs = stages * chunks
    base, extra = divmod(layers, runs)
    bounds = [run for run in range(runs) for _ in range(base + (run < extra))]

    def stage_of(layer: int) -> int:
        if layer == EMBEDDING:
            return 0
        return stages - 1 if layer == HEAD else bounds[layer] % stages

    return stage_of


def _engine_stages(layers: int, stages: int) -> Callable[[int], int]:
    """vLLM's stages: equal runs, and a remainder goes to the stages before the last, from the back."""
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    bounds = [stage for stage, count in enumerate(counts) for _ in range(count)]

    def stage_of(layer: int) -> int:
        if layer == EMBEDDING:
            return 0
        return stages - 1 if layer == HEAD else bounds[layer]

    return stage_of


def _expert_owner(expert: int, experts: int, ranks: int) -> int:
    """vLLM's linear placement: contiguous experts, the first ranks hold one more when they do not divide."""
    base, extra = divmod(experts, ranks)
    edge = extra * (base + 1)
    return expert // (base + 1) if expert < edge else extra + (expert - edge) // base


def misfits(model: Model, training: Training, generation: Generation) -> list[str]:
    """Every reason why the sizes do not fit the model."""
    return _misfits(model, training.ep, training.pp * training.vpp, "--train") + _misfits(
        model, 1, generation.pp, "--gen"
    )


def _check(model: Model, ep: int, stages: int, option: str) -> None:
    if found := _misfits(model, ep, stages, option):
        raise ValueError("\n".join(found))


def _misfits(model: Model, ep: int, stages: int, option: str) -> list[str]:
    found = []
    if ep > 1 and not model.experts:
        found.append(f"{option}: ep = {ep}, but {model.name} has no experts")
    elif model.experts and model.experts % ep:
        found.append(f"{option}: the {model.experts} experts of {model.name} do not divide over ep = {ep}")
    if stages > model.layers:
        found.append(f"{option}: {stages} pipeline runs, but {model.name} has only {model.layers} layers")
    return found
