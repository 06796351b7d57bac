"""Refits among processes that share one GPU, or have one each: the tensors of ``refit_cases`` on a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from forked_wires import Rank, Ranks
from lost_ranks import Kit
from refit_cases import GUARD, Case, Shards, contents
from small_cases import T, join

from refit_transport.engines.tensors import TensorSink
from refit_transport.planning import Plan, compile_program
from refit_transport.runtime.binding import Binding
from refit_transport.trainers.tensors import TensorSource
from refit_transport.wires.base import Wire, WireStats

ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
}
"""Several NCCL ranks on one GPU, each with few thread blocks, so that all of them fit on it at once."""

SHARED_GPU_NCCL = (2, 30, 3)
"""The oldest NCCL that lets ranks share a GPU."""
HOST_RMA_NCCL = (2, 30, 7)
"""M2N moves bytes by copy engines from here on; older ones need a GPU-initiated network."""


def device() -> torch.device:
    return torch.device("cuda")


def needs(version: tuple[int, ...]) -> None:
    """Skips the test where NCCL is older; asks it, not CUDA, which a process must not start before it forks."""
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    found = tuple(dist.ProcessGroupNCCL.get_runtime_nccl_version())
    if found < version:
        pytest.skip(f"NCCL {found} is loaded, {version} is needed (LD_PRELOAD a newer libnccl.so.2)")


def enter(rank: int) -> None:
    """First thing in each process."""
    os.environ.update(ENVIRONMENT)
    if device().type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


class DeviceShards(Shards):
    """One rank's tensors of one side on its GPU."""

    def __init__(self, case: Case, side: str, rank: int) -> None:
        with device():
            super().__init__(case, side, rank)

    def wrong(self, version: int) -> list[str]:
        found = []
        for name, held in self.held.items():
            for region, tensor in held:
                expected = contents(self.case, name, version)[region.slices()].to(tensor.dtype)
                if not torch.equal(_bits(tensor.cpu()), _bits(expected)):
                    found.append(f"{name} {region}")
        return found + ["guard"] * any(bool((raw[outside] != GUARD).any()) for raw, outside in self._buffers)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Held(NamedTuple):
    """As ``refit_cases.bound_rank`` gives it."""

    trained: DeviceShards
    served: DeviceShards
    sink: TensorSink | None
    binding: Binding


def kit(make: Callable[[], Wire]) -> Kit:
    """The bodies of ``lost_ranks`` on GPUs."""
    return Kit(make, hold, 120.0, enter)


def hold(case: Case, plan: Plan, rank: int) -> Held:
    trained, served = DeviceShards(case, "trainers", rank), DeviceShards(case, "engines", rank)
    source = TensorSource({t.name: t.shape for t in case.tensors}, trained.held) if trained.held else None
    sink = TensorSink(served.held) if served.held else None
    return Held(trained, served, sink, Binding(plan, compile_program(plan, rank), source, sink))


def refits(case: Case, make: Callable[[], Wire], versions: int = 3) -> Callable[[Rank], object]:
    """A rank's body: refit and check ``versions`` times; returns what was wrong and the statistics of each refit."""
    plan = case.plan()
    for tensor in case.tensors:
        for version in range(1, versions + 1):
            contents(case, tensor.name, version)

    def body(rank: Rank) -> tuple[list[str], list[tuple[float, WireStats]]]:
        held = hold(case, plan, rank.rank)
        wire = join(rank, make(), 120.0)
        found, seen = [], []
        for version in range(1, versions + 1):
            held.trained.fill(version)
            held.binding.begin(version)
            started = time.monotonic()
            stats = wire.run(held.binding, version, started + 60)
            seen.append((time.monotonic() - started, stats))
            if held.sink is not None:
                held.sink.commit(version)
            found += [f"version {version}: {name}" for name in held.served.wrong(version)]
            rank.barrier()
        wire.close()
        return found, seen

    return body


def run_on_device(case: Case, body: Callable[[Rank], object], barriers: int) -> dict[int, object]:
    """What ``body`` returned on each rank, once all came to ``barriers`` barriers. The first call of a library that was
    never used takes long."""
    with Ranks(body, case.domains, len(T), enter=enter) as ranks:
        ranks.exchange_endpoints()
        for _ in range(barriers):
            for rank in ranks.pipes:
                ranks.expect(rank, "here", 180)
            for pipe in ranks.pipes.values():
                pipe.send(None)
        return ranks.results(seconds=120)
