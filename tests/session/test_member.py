"""A session from joining to the tenth refit, and every way in which it can go wrong."""

import os
import signal
import time

import pytest
from ranks import EngineRank, TrainerRank, World, run_ranks

from refit_transport.session.errors import HandshakeError, RefitError
from refit_transport.session.member import EngineState, RefitMember
from refit_transport.session.report import RefitReport

WIRES = ("tcp", "gloo")


def rank_of(world, rank, address, **join):
    return (TrainerRank if rank < world.trainers else EngineRank)(world, rank, address, **join)


def three_refits(world, rank, address):
    node = rank_of(world, rank, address)
    seen = []
    for version in (1, 2, 5):
        if rank < world.trainers:
            node.load(version)
        report = node.member.refit(version, timeout=20)
        seen.append(report if rank < world.trainers else (node.wrong(version), node.member.state, node.member.version))
    node.member.leave()
    return seen


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scope", ["ffn", "all"])
@pytest.mark.parametrize("trainers, engines", [(1, 2), (3, 4)])
def test_every_engine_holds_each_version_exactly(wire, scope, trainers, engines):
    world = World(trainers, engines, {"transport": "nccl_reshard", "scope": scope, "wire": wire})
    results = run_ranks(world, three_refits)
    for outcome in results[trainers:]:
        assert outcome == [([], EngineState.FRESH, v) for v in (1, 2, 5)]
    for outcome in results[:trainers]:
        assert [report.version for report in outcome] == [1, 2, 5]


@pytest.mark.parametrize("transport", ["gather_broadcast", None])
def test_gather_and_broadcast_leaves_the_same_weights(transport):
    results = run_ranks(World(2, 2, {"transport": transport, "root": "single"}), three_refits)
    assert [outcome[-1][0] for outcome in results[2:]] == [[], []]
    assert results[0][0].bytes_reshard == 0


def test_the_report_counts_what_the_engines_hold_by_path():
    world = World(2, 2, {"transport": "nccl_reshard", "scope": "ffn", "wire": "tcp"})
    report: RefitReport = run_ranks(world, three_refits)[0][0]
    assert report.bytes_reshard == 3 * 24 * 10 * 4
    assert report.bytes_broadcast == 2 * (7 * 10 + 9 * 10 + 10) * 4
    assert report.bytes_network == 0
    assert report.bytes_domain == report.bytes_reshard + report.bytes_broadcast
    assert report.line().startswith("refit version=1 transport=nccl_reshard wire=tcp ")


def test_versions_must_grow():
    def body(world, rank, address):
        node = rank_of(world, rank, address)
        node.member.refit(3, timeout=20)
        node.member.refit(3, timeout=20)

    assert all("versions only grow" in str(r) for r in run_ranks(World(1, 1), body))


def test_a_tensor_that_no_trainer_holds_is_refused_on_every_rank_before_a_byte_moves():
    def body(world, rank, address):
        if rank < world.trainers:
            return rank_of(world, rank, address)
        held = world.held_by_engine(rank)
        held["model.layers.1.mlp.up_proj.weight"] = held["model.layers.0.mlp.gate_proj.weight"]
        from refit_transport.engines.tensors import TensorSink

        return RefitMember.join(address, rank=rank, role="engine", sink=TensorSink(held))

    results = run_ranks(World(2, 1), body)
    assert all(isinstance(r, RefitError) and "up_proj" in str(r) and "engine rank 2" in str(r) for r in results)


def test_different_package_versions_refuse_each_other(monkeypatch):
    def body(world, rank, address):
        if rank == 1:
            monkeypatch.setattr("refit_transport.session.hello.PLANNER_VERSION", 999)
        return rank_of(world, rank, address)

    results = run_ranks(World(1, 1), body)
    assert all(isinstance(r, HandshakeError) and "planner differs" in str(r) and "999" in str(r) for r in results)


def test_a_session_without_engines_is_refused():
    def body(world, rank, address):
        return TrainerRank(World(2, 0), rank, address)

    assert all("has no engine rank" in str(r) for r in run_ranks(World(2, 0), body))


@pytest.mark.parametrize("wire", WIRES)
def test_a_rank_killed_in_the_middle_of_the_refits_ends_all_others_within_two_seconds(wire):
    def body(world, rank, address):
        node = rank_of(world, rank, address)
        node.member.refit(1, timeout=20)
        if rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            node.member.refit(2, timeout=20)
        except RefitError as error:
            return time.monotonic(), str(error), node.member.state

    started = time.monotonic()
    results = run_ranks(World(2, 2, {"transport": "nccl_reshard", "scope": "all", "wire": wire}), body)
    assert results[-1] is None
    for at, text, state in results[:-1]:
        assert at - started < 15
        assert "engine rank 3" in text and "lost" in text
        assert state is EngineState.STALE


def test_a_stopped_rank_is_named_when_the_deadline_passes():
    def body(world, rank, address):
        node = rank_of(world, rank, address)
        node.member.refit(1, timeout=20)
        if rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            node.member.refit(2, timeout=1.0)
        except RefitError as error:
            return str(error)

    results = run_ranks(World(1, 2), body, stopped=2)
    assert all("engine rank 2" in text for text in results[:-1])


def test_after_a_failure_a_new_session_over_the_same_tensors_refits_again():
    def body(world, rank, address):
        node = rank_of(world, rank, address)
        if rank < world.trainers:
            node.load(4)
        node.member.leave()
        return True

    world = World(1, 2)
    assert run_ranks(world, body) == [True] * 3
    assert [r[-1][0] for r in run_ranks(world, three_refits)[1:]] == [[], []]
