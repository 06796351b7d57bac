"""A sample of the matrix over real processes and sockets, for several versions in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from refit_transport.session.member import RefitMember
from refit_transport.trainers.base import WeightSource
from tests.matrix.engines import ENGINES, engine_ranks
from tests.matrix.policies import policy
from tests.matrix.refits import PATHS, bytes_on_links
from tests.matrix.trainers import sources
from tests.session.ranks import run_ranks

SIGNS = {1: 1.0, 2: -1.0, 7: 1.0}
"""By version: what the trainers' weights are multiplied with."""

SAMPLE = (
    ("FSDP 2", "TP 2", "dense", "ffn"),
    ("FSDP 3 (uneven)", "TP 4", "dense tied", "all"),
    ("HSDP 2 x 2", "TP 2 and TP 1 and PP 2", "dense", "broadcast"),
    ("FSDP 2 x TP 2", "DP 2", "experts tied", "all"),
    ("FSDP 3 x TP 2 (uneven)", "PP 2", "dense tied", "all"),
    ("FSDP 2 x EP 2", "TP 2 x EP 2", "experts", "ffn"),
    ("Megatron PP 2 x VPP 2 x EP 2", "DP 3 x EP 3 (uneven)", "experts", "all"),
    ("Megatron TP 4", "TP 2 x DP 2", "dense", "broadcast from one root"),
)


@dataclass
class World:
    """What ``run_ranks`` needs to know."""

    size: int
    options: dict[str, Any]


def multiply(source: WeightSource, sign: float) -> None:
    """An optimizer step that replicas agree on: the live memory of every holding changes."""
    with torch.no_grad():
        for name, regions in source.holdings().items():
            for region in regions:
                source.view(name, region).mul_(sign)


def refits(held: tuple[WeightSource, ...], engine: str, name: str) -> Callable[[World, int, str], Any]:
    """A rank's body: join, refit to every version, and report wrong names (engines) or the reports (rank 0)."""

    def body(world: World, rank: int, address: str) -> Any:
        domain = f"host of {'trainers' if rank < len(held) else (rank - len(held)) // 2}"
        if rank < len(held):
            member = RefitMember.join(address, rank=rank, role="trainer", source=held[rank], domain=domain, timeout=60)
        else:
            served = engine_ranks(policy(name), engine, torch.float32)[rank - len(held)]
            member = RefitMember.join(address, rank=rank, role="engine", sink=served.sink, domain=domain, timeout=60)
        found, sign = [], 1.0
        for version, wanted in SIGNS.items():
            if rank < len(held):
                multiply(held[rank], wanted * sign)
            sign = wanted
            report = member.refit(version, timeout=60)
            found.append(report if rank < len(held) else (served.wrong(wanted), served.sink.version))
        member.leave()
        return found, bytes_on_links(member.agreement.plan)

    return body


@pytest.mark.parametrize(("trainer", "engine", "name", "path"), SAMPLE)
def test_every_version_arrives_over_sockets(trainer: str, engine: str, name: str, path: str) -> None:
    held = sources(trainer, name)
    size = len(held) + sum(sizes.world for sizes in ENGINES[engine])
    results = run_ranks(World(size, {**PATHS[path], "wire": "tcp"}), refits(held, engine, name))
    assert [r for r in results if isinstance(r, BaseException)] == []
    for found, _ in results[len(held) :]:
        assert found == [([], version) for version in SIGNS]
    reports, links = results[0]
    for report in reports:
        assert (report.bytes_network, report.bytes_domain) == (links["network"], links["domain"])
        assert bool(report.bytes_reshard) == ("scope" in PATHS[path])
        assert bool(report.bytes_broadcast) == (path != "all")
