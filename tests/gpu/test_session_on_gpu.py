"""A whole session over the real NCCL wires: handshake, plan, refits and counts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
from device_ranks import HOST_RMA_NCCL, SHARED_GPU_NCCL, enter, needs
from device_world import DeviceEngineRank, DeviceWorld
from ranks import TrainerRank, run_ranks

from refit_transport.session.errors import HandshakeError
from refit_transport.wires.m2n import M2nWire
from refit_transport.wires.nccl import NcclWire

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [NcclWire, M2nWire])
@pytest.mark.parametrize("scope", ["ffn", "all"])
def test_every_engine_holds_each_version_exactly(make: type, scope: str) -> None:
    if make is M2nWire and not (find_spec("nccl") and find_spec("nccl.m2n")):
        pytest.skip("needs pip install 'refit-transport[m2n]'")
    needs(HOST_RMA_NCCL if make is M2nWire else SHARED_GPU_NCCL)

    def three_refits(world: DeviceWorld, rank: int, address: str) -> tuple[list[str], str]:
        enter(rank)
        trains = rank < world.trainers
        node = (TrainerRank if trains else DeviceEngineRank)(world, rank, address, wire=make())
        wrong = []
        for version in (1, 2, 3):
            if trains:
                node.load(version)
            report = node.member.refit(version, timeout=60)
            wrong += [] if trains else node.wrong(version)
        node.member.leave()
        return wrong, report.wire

    world = DeviceWorld(2, 2, {"transport": "nccl_reshard", "scope": scope})
    assert run_ranks(world, three_refits) == [([], make.name)] * 4


def other_memory(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")


def other_library(monkeypatch) -> None:
    monkeypatch.setattr("refit_transport.wires.nccl_group.loaded_version", lambda: (2, 27, 3))


@pytest.mark.parametrize("change, told", [(other_memory, "NCCL_CUMEM_ENABLE"), (other_library, "NCCL version differs")])
def test_ranks_whose_nccl_differs_refuse_each_other(change: Callable, told: str, monkeypatch) -> None:
    needs(SHARED_GPU_NCCL)

    def body(world: DeviceWorld, rank: int, address: str) -> object:
        enter(rank)
        if rank == 1:
            change(monkeypatch)
        make = TrainerRank if rank < world.trainers else DeviceEngineRank
        return make(world, rank, address, wire=NcclWire())

    results = run_ranks(DeviceWorld(1, 1), body)
    assert all(isinstance(r, HandshakeError) and told in str(r) for r in results)
