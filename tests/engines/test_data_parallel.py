"""Engines of two data-parallel cores, with experts over the workers of both: refits equal a fresh engine's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_engines import outputs_of
from vllm_sessions import source_of

from refit_transport.cluster.data_parallel import core_env, free_port
from refit_transport.engines.vllm.cpu_fixups import all_gatherv, reduce_scatterv
from refit_transport.engines.vllm.ranks import WorkerRank
from refit_transport.session.control_server import ControlServer
from refit_transport.session.member import RefitMember
from tests.equality.refit_sessions import ReplicaProcess, fingerprints, join, leave, refit
from tests.models import make_model

pytestmark = pytest.mark.engine

CORES = 2
START_S = 240.0
LAYOUTS = {"EP2 over DP2": (1, 1), "EP4 over DP2 x TP2": (1, 2), "EP2 over DP2, PP2": (2, 1)}
"""Pipeline stages and tensor-parallel ranks of a core."""


@dataclass
class Engine:
    """Checkpoints A and B, and the cores of an engine of B."""

    paths: dict[str, Path]
    cores: list[ReplicaProcess]
    stages: int
    tensor: int

    @property
    def coordinates(self) -> list[tuple[int, int, int]]:
        """Core, stage and tensor-parallel rank of every worker, in the order of their ranks."""
        return list(product(range(CORES), range(self.stages), range(self.tensor)))

    def call(self, function: Any, *args: Any) -> list[Any]:
        """On all cores at once, which may have to start first; answers by core."""
        for core in self.cores:
            core.begin(function, *args)
        return [core.end(START_S) for core in self.cores]

    def bring(self, which: str) -> list[dict[str, Any]]:
        """One refit, in a session of its own, from a trainer that holds all of checkpoint ``which``. Returns the state
        of all workers, core after core."""
        server = ControlServer(1 + len(self.coordinates), {"transport": "nccl_reshard", "scope": "all"})
        try:
            for core in self.cores:
                core.begin(join, {"address": server.address, "engine": 0, "rank_offset": 1})
            source = source_of(self.paths[which])
            member = RefitMember.join(server.address, rank=0, role="trainer", source=source, timeout=60.0)
            for core in self.cores:
                core.end()
                core.begin(refit, 1)
            member.refit(1, timeout=60.0)
            answers = [core.end() for core in self.cores]
            member.leave()
            self.call(leave)
        finally:
            server.close()
        return [status for statuses, _ in answers for status in statuses]


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    stages, tensor = request.param
    options = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    options["distributed_executor_backend"] = "uni" if stages * tensor == 1 else "mp"
    paths = {which: make_model("qwen3_moe", tmp_path / which, seed) for seed, which in enumerate("ab")}
    port = free_port()
    cores = [
        ReplicaProcess(
            paths["b"],
            env=core_env(rank, CORES, "127.0.0.1", port),
            dtype="float32",
            enable_expert_parallel=True,
            **options,
        )
        for rank in range(CORES)
    ]
    yield Engine(paths, cores, stages, tensor)
    for core in cores:
        core.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_refits_there_and_back_equal_the_engine_as_it_was_loaded(engine):
    before, fresh = engine.call(fingerprints), engine.call(outputs_of)
    workers = [hashes for core in before for hashes in core]
    expert_weights = [{path for path in hashes if path.endswith("w13_weight")} for hashes in workers]
    assert all(expert_weights)
    for path in set.union(*expert_weights):
        digests = [hashes[path] for hashes in workers if path in hashes]
        assert len(set(digests)) == len(digests) == CORES * engine.tensor  # every worker has experts of its own
    states = engine.bring("a")
    assert [state["rank"] for state in states] == list(range(1, 1 + len(workers)))
    assert [tuple(int(state["labels"][name]) for name in ("dp", "pp", "tp")) for state in states] == engine.coordinates
    assert {state["state"] for state in states} == {"fresh"}
    between = [hashes for core in engine.call(fingerprints) for hashes in core]
    for was, now, paths in zip(workers, between, expert_weights, strict=True):
        assert all(was[path] != now[path] for path in paths)
    assert [core[0][0] for core in engine.call(outputs_of)] != [core[0][0] for core in fresh]
    engine.bring("b")
    assert engine.call(fingerprints) == before
    assert engine.call(outputs_of) == fresh


def parallel_config(rank: int, tensor: int, pipeline: int, index: int, **fields: Any) -> Any:
    return SimpleNamespace(
        rank=rank, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_index=index,
        **{"world_size": tensor * pipeline, "distributed_executor_backend": "mp", "data_parallel_size": 1, **fields},
    )  # fmt: skip


LAUNCHED = {"distributed_executor_backend": "external_launcher", "data_parallel_size": 2}
RANKS = {
    "alone": (parallel_config(0, 1, 1, 0), (0, 0, 0, 0)),
    "TP2": (parallel_config(1, 2, 1, 0), (0, 0, 1, 1)),
    "PP2 x TP2": (parallel_config(2, 2, 2, 0), (0, 1, 0, 2)),
    "second core of DP2 x PP2 x TP2": (parallel_config(3, 2, 2, 1, data_parallel_size=2), (1, 1, 1, 7)),
    "second replica of a dense model, which counts as an engine of its own": (
        parallel_config(1, 2, 1, 1),
        (1, 0, 1, 3),
    ),
    "prefill-context parallelism between stage and tensor": (parallel_config(5, 2, 2, 0, world_size=8), (0, 1, 1, 5)),
    "a launcher that counts all cores": (parallel_config(3, 2, 1, 1, world_size=4, **LAUNCHED), (1, 0, 1, 3)),
}


@pytest.mark.parametrize("name", RANKS)
def test_a_worker_knows_its_place_from_vllms_configuration(name):
    config, expected = RANKS[name]
    place = WorkerRank.of(config)
    assert (place.data, place.pipeline, place.tensor, place.in_engine) == expected
    assert place.labels == dict(zip(("dp", "pp", "tp", "worker"), map(str, expected), strict=True))


def test_real_configurations_name_the_fields_that_ranks_are_read_from(monkeypatch):
    from vllm.config import ParallelConfig
    from vllm.envs import disable_envs_cache

    disable_envs_cache()  # an engine of this process has frozen them
    for key, value in core_env(1, 2, "127.0.0.1", 7000).items():
        monkeypatch.setenv(key, value)
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="mp")
    config.rank = 2
    assert WorkerRank.of(config) == WorkerRank(data=1, pipeline=1, tensor=0, in_core=2, in_engine=6)


class Group:
    """What both exchanges read of vLLM's communicator, with collectives that another rank of equal content answers."""

    device_group, world_size, rank_in_group = None, 2, 1


def test_tokens_of_ranks_with_different_numbers_of_them_are_gathered_and_summed(monkeypatch):
    def all_gather(parts, tensor, group):
        for part, factor in zip(parts, (10, 1), strict=True):
            part.copy_(tensor * factor)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(2))
    own = torch.tensor([[1.0], [2.0]])
    gathered, ids = all_gatherv(Group, [own, own.int()], 0, [1, 2])
    assert gathered.tolist() == [[10.0], [1.0], [2.0]]
    assert (ids.dtype, ids.tolist()) == (torch.int32, [[10], [1], [2]])
    assert all_gatherv(Group, own).tolist() == [[10.0], [20.0], [1.0], [2.0]]
    sums = torch.tensor([[1.0], [2.0], [3.0]])
    assert reduce_scatterv(Group, sums, 0, [1, 2]).tolist() == [[4.0], [6.0]]
    assert sums.tolist() == [[1.0], [2.0], [3.0]]
