"""``reshard`` on real gloo ranks, byte by byte: any meshes, any placements, every dtype, and nothing else touched."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import refit_transport
from refit_transport.collective import ReshardError, Resharding, reshard
from refit_transport.layout.layout import ITEMSIZE
from refit_transport.planning import PlanOptions

FORK = multiprocessing.get_context("fork")
WORLD = 7
GUARD = 64
"""Bytes before and after each destination shard that must stay as they are."""
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def oracle(name: str, version: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A full tensor whose bytes are a 64-bit hash of (name, version, global index), as many as an element has."""
    seed = (hash_of(name) + version * 0x9E3779B97F4A7C15) % 2**64
    index = np.arange(prod(shape), dtype=np.uint64)
    mixed = (index + np.uint64(seed)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = np.stack([mixed ^ (mixed >> np.uint64(31)), mixed * np.uint64(3)], axis=-1)
    if dtype is torch.bool:
        return torch.from_numpy((words[..., 0] & np.uint64(1)).astype(bool)).reshape(shape)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = words.view(np.uint8).reshape(prod(shape), 16)[:, :size].copy()
    return torch.from_numpy(raw).reshape(-1).view(dtype).reshape(shape)


def hash_of(name: str) -> int:
    return sum((i + 1) * 1099511628211 * ord(c) for i, c in enumerate(name))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)


class Case:
    """A source and a destination mesh, as nested lists of ranks, with their placements."""

    def __init__(
        self,
        label: str,
        shape: tuple[int, ...],
        source: tuple[list, list[Any]],
        sink: tuple[list, list[Any]],
        dtype: torch.dtype = torch.bfloat16,
        domains: list[list[int]] | None = None,
        **options: Any,
    ) -> None:
        self.label, self.shape, self.source, self.sink, self.dtype = label, shape, source, sink, dtype
        self.domains, self.options = domains, PlanOptions(**{"stripe_bytes": 16, **options})

    def check(self) -> None:
        """Twice over one plan: the second version must arrive as well as the first."""
        source, sink = self.distributed(self.source, 0), self.distributed(self.sink, 9)
        guarded = guard(sink)
        moved = Resharding(source, sink, domains=self.domains, options=self.options, wire="tcp", timeout_s=20)
        with moved as resharding:
            for version in (1, 2):
                shard_into(source, oracle(self.label, version, self.shape, self.dtype))
                resharding.run()
                wanted = self.distributed(self.sink, version)
                if sink is not None:
                    assert torch.equal(as_bytes(sink.to_local()), as_bytes(wanted.to_local())), self.label
                    assert (guarded[:GUARD] == 0xA5).all() and (guarded[-GUARD:] == 0xA5).all(), self.label

    def distributed(self, side: tuple[list, list[Any]], version: int) -> DTensor | None:
        ranks, placements = side
        mesh = DeviceMesh("cpu", ranks, _init_backend=False)
        if mesh.get_coordinate() is None:
            return None
        full = oracle(self.label, version, self.shape, self.dtype)
        return distribute_tensor(full, mesh, placements, src_data_rank=None)


def guard(tensor: DTensor | None) -> torch.Tensor | None:
    """Moves a shard into the middle of a buffer, and returns the buffer (uint8)."""
    if tensor is None:
        return None
    local = tensor.to_local()
    buffer = torch.full((GUARD * 2 + local.numel() * local.element_size(),), 0xA5, dtype=torch.uint8)
    middle = buffer[GUARD : len(buffer) - GUARD]
    tensor._local_tensor = middle.view(local.dtype).reshape(local.shape) if local.numel() else local
    return buffer


def shard_into(tensor: DTensor | None, full: torch.Tensor) -> None:
    if tensor is not None:
        part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        as_is = tensor.to_local()
        as_is.view(torch.uint8).copy_(part.view(torch.uint8)) if as_is.ndim else as_is.copy_(part)


def placements_of(*, both: bool) -> list[tuple[str, list[Any]]]:
    """The four placements of the layout table, over a two-dimensional mesh."""
    table = [("sr0", [S0, R]), ("rs0", [R, S0]), ("sr1", [S1, R]), ("rs1", [R, S1])]
    return table + ([("s0s1", [S0, S1]), ("s0s0", [S0, S0])] if both else [])


def matrix() -> list[Case]:
    """The layouts that the peers' suites cover, scaled down, and what they lack."""
    cases = [Case("full replication", (20, 20), ([0, 1, 2], [R]), ([3, 4, 5], [R]), torch.float32)]
    for a in (S0, S1):
        for b in (S0, S1):
            cases.append(Case(f"1-D {a} {b}", (20, 20), ([0, 1, 2], [a]), ([3, 4, 5, 6], [b])))
    for name, source in placements_of(both=True):
        for other, sink in placements_of(both=True):
            meshes = [[0, 1], [2, 3]], [[4, 5]], [[4], [5]]
            shape = (24, 20) if (len(name) + len(other)) % 2 else (13, 7)
            cases.append(Case(f"2-D {name} {other}", shape, (meshes[0], source), (meshes[1], sink)))
            cases.append(Case(f"2-D {name} {other} tall", shape, (meshes[2], source), ([[0, 1], [2, 3]], sink)))
    for a, b in [(S0, S0), (S0, S2), (S2, S0), (S1, S0), (S1, S1), (S1, S2), (Shard(-1), Shard(-2))]:
        cases.append(Case(f"3-D {a} {b}", (8, 12, 5), ([0, 1, 2], [a]), ([3, 4, 5, 6], [b])))
    cases += [
        Case("3 to 1", (12,), ([0, 1, 2, 3, 4, 5], [S0]), ([6], [R])),
        Case("1 to 6", (13,), ([0], [R]), ([1, 2, 3, 4, 5, 6], [S0])),
        Case("tiny contribution", (4,), ([0, 1], [R]), ([2, 3], [R]), torch.float32),
        Case("destination mesh first", (4096,), ([4, 5, 6], [S0]), ([0, 1, 2], [S0])),
        Case("interleaved ranks", (11, 6), ([5, 1, 3], [S0]), ([6, 0, 4, 2], [S1])),
        Case("one rank to itself", (9, 4), ([3], [R]), ([3], [R])),
        Case("all ranks on both sides", (17, 5), (list(range(7)), [S0]), (list(range(7)), [S1])),
        Case("4-D", (3, 5, 7, 2), ([[0, 1], [2, 3]], [S2, S1]), ([4, 5, 6], [Shard(3)])),
        Case("5-D", (2, 3, 2, 3, 2), ([0, 1, 2], [S1]), ([3, 4], [Shard(4)])),
        Case("0-D", (), ([0, 1], [R]), ([2, 3, 4], [R]), torch.float32),
        Case("empty shards", (5, 3), ([0, 1, 2, 3], [S0]), ([4, 5, 6], [S0])),
        Case("empty tensor", (0, 3), ([0, 1], [S0]), ([2, 3], [S0])),
        Case("uneven 10 over 4", (10, 2), ([0, 1, 2, 3], [S0]), ([4, 5, 6], [S0])),
        Case("three domains, replicas 1, 2, 3", (24, 6), ([0], [R]), ([1, 2, 3, 4, 5, 6], [R]),
             domains=[[0], [1], [2, 3], [4, 5, 6]]),
        Case("relayed through three domains", (24, 6), ([0], [R]), ([1, 2, 3, 4, 5, 6], [R]),
             domains=[[0], [1], [2, 3], [4, 5, 6]], relay="always"),
        Case("once per domain", (32, 8), ([0, 1, 2], [S0]), ([[3, 4], [5, 6]], [R, S1]),
             domains=[[0, 1, 2], [3, 4, 5, 6]]),
        Case("many buckets", (64, 48), ([0, 1, 2], [S0]), ([3, 4, 5, 6], [S1]), bucket_bytes=1024),
    ]  # fmt: skip
    return cases


def dtypes() -> list[Case]:
    return [
        Case(f"dtype {name}", (13, 6), ([0, 1, 2], [S0]), ([3, 4, 5], [S1]), getattr(torch, name)) for name in ITEMSIZE
    ]


def worker(rank: int, folder: str, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    while (job := jobs.get()) is not None:
        try:
            job()
            results.put((rank, None))
        except BaseException:
            results.put((rank, traceback.format_exc()))
    os._exit(0)


class Gloo:
    """Gloo ranks that run one function after another, all of them each."""

    def __init__(self, folder: str) -> None:
        self.jobs = [FORK.SimpleQueue() for _ in range(WORLD)]
        self.results = FORK.Queue()
        self.processes = [
            FORK.Process(target=worker, args=(rank, folder, self.jobs[rank], self.results)) for rank in range(WORLD)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[[], None]) -> None:
        for jobs in self.jobs:
            jobs.put(function)
        try:
            outcomes = [self.results.get(timeout=60) for _ in range(WORLD)]
        except queue.Empty:
            pytest.fail("a rank did not answer within 60 s")
        failed = {rank: text for rank, text in outcomes if text}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))

    def stop(self) -> None:
        for jobs in self.jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def gloo() -> Iterator[Gloo]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Gloo(folder)
        yield ranks
        ranks.stop()


@pytest.mark.parametrize("case", matrix(), ids=lambda case: case.label)
def test_every_layout_arrives_byte_for_byte(gloo: Gloo, case: Case) -> None:
    gloo.run(case.check)


@pytest.mark.parametrize("case", dtypes(), ids=lambda case: case.label)
def test_every_dtype_arrives_byte_for_byte(gloo: Gloo, case: Case) -> None:
    gloo.run(case.check)


def several_tensors_at_once() -> None:
    rank = dist.get_rank()
    mesh = (
        DeviceMesh("cpu", [0, 1], _init_backend=False) if rank < 2 else DeviceMesh("cpu", [2, 3], _init_backend=False)
    )
    names = {"w": (6, 4), "b": (5,)}
    full = {name: oracle(name, 1, shape, torch.float32) for name, shape in names.items()}
    held = (
        {name: distribute_tensor(t, mesh, [S0], src_data_rank=None) for name, t in full.items()} if rank < 2 else None
    )
    plain = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in names.items()} if rank > 3 else None
    stats = refit_transport.reshard(held, plain, domains=[[0, 1], [2, 3], [4, 5], [6]], wire="tcp")
    for name, tensor in (plain or {}).items():
        assert torch.equal(tensor.view(torch.int16), full[name].to(torch.bfloat16).view(torch.int16))
    assert sum(stats.sent.values()) > 0 or rank not in (0, 1)


def test_several_tensors_travel_at_once_into_plain_copies_of_another_dtype(gloo: Gloo) -> None:
    gloo.run(several_tensors_at_once)


def shapes_that_disagree() -> None:
    rank = dist.get_rank()
    tensor = torch.zeros(4 if rank == 0 else 5)
    with pytest.raises(ReshardError, match=r"phase plan on rank 0: .*shape \(4,\) on the trainers, \(5,\)"):
        reshard(tensor if rank == 0 else None, tensor if rank else None, wire="tcp")


def options_that_disagree() -> None:
    rank = dist.get_rank()
    with pytest.raises(ReshardError, match="phase connect on rank 0: ValueError: ranks made different plans"):
        reshard(torch.ones(4), torch.ones(4), options=PlanOptions(bucket_bytes=4096 + rank), wire="tcp")


@pytest.mark.parametrize("failure", [shapes_that_disagree, options_that_disagree], ids=lambda f: f.__name__)
def test_a_refusal_is_the_same_error_on_every_rank_and_the_group_stays_usable(
    gloo: Gloo, failure: Callable[[], None]
) -> None:
    gloo.run(failure)
    gloo.run(several_tensors_at_once)
