"""From every trainer layout to every engine layout: each rank ends with what loading the checkpoint would give it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refit_transport.layout.alignment import LINE, PAGE
from refit_transport.runtime.staging import SLOTS
from refit_transport.session.totals import check_counts
from tests.matrix import engines, policies, trainers
from tests.matrix.in_memory_wire import InMemoryWire
from tests.matrix.refits import PATHS, Refit, assembled, bytes_on_links, prepare

torch.set_num_threads(1)
TRAINERS = (*trainers.DTENSOR, *trainers.MEGATRON)
DOMAINS = ("sides", "one", "each")
TURNS = ("all", "ffn", "all", "broadcast", "broadcast from one root")


def pairs() -> Iterator[tuple[str, str, str, str, str, torch.dtype]]:
    """All pairs of layouts. Policies (of experts where a layout spreads experts), paths, domains and dtypes take turns
    along both axes, so that each of them meets every layout."""
    expert_layouts = trainers.NEEDS_EXPERTS | engines.NEEDS_EXPERTS
    for (i, trainer), (j, engine) in product(enumerate(TRAINERS), enumerate(engines.ENGINES)):
        kind = "experts" if {trainer, engine} & expert_layouts or (i + j) % 4 < 2 else "dense"
        name = f"{kind} tied" if (i + j) % 2 else kind
        dtype = torch.bfloat16 if (i + 3 * j) % 7 < 3 else torch.float32
        yield trainer, engine, name, TURNS[(i + j) % len(TURNS)], DOMAINS[(i + 2 * j) % 3], dtype


PAIRS = tuple(pairs())


def test_the_matrix_has_every_pair_and_every_layout_meets_every_path_and_policy() -> None:
    assert len({pair[:2] for pair in PAIRS}) == len(TRAINERS) * len(engines.ENGINES) >= 60
    for axis, layouts in ((0, TRAINERS), (1, engines.ENGINES)):
        for layout in layouts:
            met = [pair for pair in PAIRS if pair[axis] == layout]
            kinds = {"experts"} if layout in trainers.NEEDS_EXPERTS | engines.NEEDS_EXPERTS else {"dense", "experts"}
            assert {pair[2].removesuffix(" tied") for pair in met} == kinds, layout
            assert {pair[3] for pair in met} == set(PATHS), layout
            assert {"tied" in pair[2] for pair in met} == {True, False}, layout
            assert {pair[4] for pair in met} == set(DOMAINS), layout
            assert {pair[5] for pair in met} == {torch.float32, torch.bfloat16}, layout


HOLDERS = [(t, n) for t in TRAINERS for n in policies.NAMES if "experts" in n or t not in trainers.NEEDS_EXPERTS]


@pytest.mark.parametrize(("layout", "name"), HOLDERS)
def test_trainers_hold_together_the_checkpoint_that_the_unsharded_model_saves(layout: str, name: str) -> None:
    saved, held = policies.policy(name).checkpoint, assembled(trainers.sources(layout, name))
    assert held.keys() == saved.keys()
    assert [tensor for tensor, value in saved.items() if not torch.equal(held[tensor], value)] == []


class Allocations(TorchDispatchMode):
    """Remembers the largest memory that any operation took anew, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                self.largest = max(self.largest, storage.nbytes())
        return result


def staging_bound(refit: Refit, rank: int) -> int:
    """Two buckets, in slots of half of one, every message in them rounded up to a line, and each slot to a page."""
    messages = max(len(bucket.sends) + len(bucket.recvs) for bucket in refit.bindings[rank].program.buckets)
    return 2 * refit.plan.options.bucket_bytes + SLOTS * (LINE * messages + PAGE)


@pytest.mark.parametrize(("trainer", "engine", "name", "path", "domains", "dtype"), PAIRS, ids=lambda part: str(part))
def test_a_refit_leaves_what_loading_the_checkpoint_leaves(
    trainer: str, engine: str, name: str, path: str, domains: str, dtype: torch.dtype
) -> None:
    refit = prepare(trainer, engine, name, path, domains, dtype)
    wire, allocations = InMemoryWire(refit.bindings, direct_bytes=512 if path == "all" else None), Allocations()
    with allocations if path == "all" else nullcontext():
        stats = wire.run(1)

    assert {rank: wrong for rank, e in refit.engines.items() if (wrong := e.wrong())} == {}
    for rank, counted in stats.items():
        check_counts(counted, refit.expected[rank], f"rank {rank}")
    planned = bytes_on_links(refit.plan)
    for link, nbytes in planned.items():
        assert sum(s.sent[link] for s in stats.values()) == nbytes
        assert sum(s.received[link] for s in stats.values()) == nbytes

    bounds = {rank: staging_bound(refit, rank) for rank in refit.bindings}
    staged = {r: 0 if b.memory is None else b.memory.numel() for r, b in refit.bindings.items()}
    assert {rank: size for rank, size in staged.items() if size > bounds[rank]} == {}
    if path == "all":
        largest = max(tensor.nbytes for tensor in policies.policy(name).checkpoint.values())
        assert {
            rank: b.peak_extra_bytes for rank, b in refit.bindings.items() if b.peak_extra_bytes > bounds[rank]
        } == {}
        assert allocations.largest <= max(bounds.values()) < largest
        stored = sum(expected.reshard for expected in refit.expected.values())
        assert stored == sum(held_bytes(e, refit) for e in refit.engines.values())


def held_bytes(engine: engines.EngineRank, refit: Refit) -> int:
    """Bytes of the engine rank's weights without padding, in the dtype in which they travel."""
    guard = torch.tensor(engines.GUARD)
    itemsize = {2: 2, 4: 4}[next(iter(engine.loaded.values())).itemsize]
    return sum(int((t != guard.to(t.dtype)).sum()) for t in engine.loaded.values()) * itemsize
