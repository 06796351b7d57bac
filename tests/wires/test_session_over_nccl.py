"""A whole session over the NCCL wires, on their stand-ins: handshake, plan, refits, counts, and what has to agree."""

from __future__ import annotations

import sys
from pathlib import Path

import m2n_stand_in
import pytest
from nccl_stand_in import Group, HostQueue, nccl_wire

from refit_transport.session.errors import HandshakeError
from refit_transport.wires.m2n import M2nWire
from refit_transport.wires.m2n_library import Library

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "session"))
from ranks import EngineRank, TrainerRank, World, run_ranks


def m2n_wire() -> M2nWire:
    return M2nWire(queue=HostQueue(), group_maker=Group, library=lambda: Library(m2n_stand_in, m2n_stand_in))


def member(world: World, rank: int, address: str, make):
    return (TrainerRank if rank < world.trainers else EngineRank)(world, rank, address, wire=make())


@pytest.mark.parametrize("make", [nccl_wire, m2n_wire])
@pytest.mark.parametrize("scope", ["ffn", "all"])
def test_every_engine_holds_each_version_exactly(make, scope: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("M2N_STAND_IN_STORE", str(tmp_path / "store"))

    def three_refits(world: World, rank: int, address: str):
        node = member(world, rank, address, make)
        wrong = []
        for version in (1, 2, 3):
            if rank < world.trainers:
                node.load(version)
            report = node.member.refit(version, timeout=20)
            wrong += [] if rank < world.trainers else node.wrong(version)
        node.member.leave()
        return wrong, report.wire

    world = World(3, 4, {"transport": "nccl_reshard", "scope": scope})
    assert run_ranks(world, three_refits) == [([], make().name)] * 7


@pytest.mark.parametrize("variable, value", [("NCCL_CUMEM_ENABLE", "0")])
def test_ranks_whose_nccl_differs_refuse_each_other(variable: str, value: str, monkeypatch) -> None:
    def body(world: World, rank: int, address: str):
        if rank == 1:
            monkeypatch.setenv(variable, value)
        return member(world, rank, address, nccl_wire)

    results = run_ranks(World(1, 1), body)
    assert all(isinstance(r, HandshakeError) and variable in str(r) and value in str(r) for r in results)


def test_ranks_that_load_another_nccl_refuse_each_other(monkeypatch) -> None:
    def body(world: World, rank: int, address: str):
        version = (2, 30, 7) if rank else (2, 29, 7)
        monkeypatch.setattr("refit_transport.wires.nccl_group.loaded_version", lambda: version)
        return member(world, rank, address, nccl_wire)

    results = run_ranks(World(1, 1), body)
    assert all(isinstance(r, HandshakeError) and "NCCL version differs" in str(r) for r in results)
    assert all("2.29.7" in str(r) and "2.30.7" in str(r) for r in results)
