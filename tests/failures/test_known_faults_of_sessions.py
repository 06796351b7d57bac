"""Faults of a kind that users reported, in joining, waiting and committing. docs/failures.md lists them all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from refit_transport.engines.tensors import TensorSink
from refit_transport.planning.plan import Link
from refit_transport.session.control_client import ControlClient
from refit_transport.session.control_server import ControlServer
from refit_transport.session.errors import HandshakeError, RefitError
from refit_transport.session.hello import Hello, check_hellos
from refit_transport.session.member import EngineState
from refit_transport.wires.base import WireError, WireStats
from refit_transport.wires.gloo import GlooWire
from refit_transport.wires.tcp import TcpWire
from tests.session.ranks import EngineRank, TrainerRank, World


class Threads:
    """The ranks of a small world as threads of this process; leaving it ends the session."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.server = ControlServer(world.size, world.options)
        self._pool = ThreadPoolExecutor(world.size)
        self.nodes: dict[int, Any] = {}

    def join(self, rank: int, **join: Any) -> Future:
        kind = TrainerRank if rank < self.world.trainers else EngineRank

        def joined() -> Any:
            self.nodes[rank] = node = kind(self.world, rank, self.server.address, **join)
            return node

        return self._pool.submit(joined)

    def on_all(self, call: Callable[[Any], Any]) -> list[Any]:
        """What ``call`` gave or raised, by rank."""
        futures = [self._pool.submit(call, self.nodes[rank]) for rank in range(self.world.size)]
        return [future.exception(timeout=30) or future.result() for future in futures]

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.member.leave()
        self.server.close()
        self._pool.shutdown()


def test_no_side_starts_before_the_last_rank_is_ready() -> None:
    with Threads(World(1, 2)) as threads:
        early = [threads.join(0), threads.join(1)]
        assert wait(early, timeout=0.5).done == set()
        for future in (*early, threads.join(2)):
            future.result(timeout=30)
        assert [r for r in threads.on_all(lambda n: n.member.refit(1, timeout=20)) if isinstance(r, Exception)] == []


def test_a_joined_engine_is_stale_until_a_refit_completed() -> None:
    with Threads(World(1, 1)) as threads:
        for future in (threads.join(0), threads.join(1)):
            future.result(timeout=30)
        engine = threads.nodes[1].member
        assert (engine.state, engine.version) == (EngineState.STALE, -1)
        threads.on_all(lambda n: n.member.refit(3, timeout=20))
        assert (engine.state, engine.version) == (EngineState.FRESH, 3)


@pytest.mark.parametrize("rank", [-1, 3, 7])
def test_a_rank_outside_the_world_is_told_so_at_once(rank: int) -> None:
    server = ControlServer(3, {})
    try:
        started = time.monotonic()
        with pytest.raises(RefitError, match=f"rank {rank} is outside this session's world of 3"):
            ControlClient(server.address, rank, f"engine rank {rank}", started + 30)
        assert time.monotonic() - started < 5
    finally:
        server.close()


def _tcp_port(wire: TcpWire) -> tuple[str, int]:
    host, port = wire.listen(0)["network"]
    return host, port


def _gloo_port(wire: GlooWire) -> tuple[str, int]:
    endpoint = wire.listen(0)
    return endpoint["host"], endpoint["port"]


@pytest.mark.parametrize(("make", "port_of"), [(TcpWire, _tcp_port), (GlooWire, _gloo_port)], ids=["tcp", "gloo"])
def test_a_published_port_is_held_from_the_moment_it_is_chosen(make: type, port_of: Callable) -> None:
    wire = make()
    try:
        address = port_of(wire)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
    finally:
        wire.close()


@pytest.mark.parametrize("wire", ["tcp", "gloo"])
@pytest.mark.parametrize("transport", ["nccl_reshard", "gather_broadcast"])
@pytest.mark.parametrize("from_options", [True, False], ids=["timeout_s of the session", "timeout of the call"])
def test_every_transport_on_every_wire_keeps_the_deadline(transport: str, wire: str, from_options: bool) -> None:
    """The last rank does not come to the second refit; the others wait for it as long as they were told."""
    options = {"transport": transport, "wire": wire, "timeout_s": 1.5 if from_options else 30.0}
    release = threading.Event()

    def second_refit(node: Any) -> Any:
        node.member.refit(1, timeout=20)
        if node.member.rank == 2:
            release.wait(30)
            return None
        started = time.monotonic()
        try:
            node.member.refit(2, timeout=None if from_options else 1.5)
        except RefitError as error:
            return time.monotonic() - started, str(error)
        finally:
            release.set()

    with Threads(World(1, 2, options)) as threads:
        for future in [threads.join(rank, timeout=30) for rank in range(3)]:
            future.result(timeout=30)
        results = threads.on_all(second_refit)
    for waited, text in results[:2]:
        assert waited < 10
        assert "engine rank 2" in text


class TornWire(TcpWire):
    """Loses its peer after everything was sent."""

    def run(self, *args: Any, **options: Any) -> WireStats:
        super().run(*args, **options)
        raise WireError("the last bytes were lost", phase="exchange")


class WatchedSink(TensorSink):
    """Remembers which versions it was told to finish."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.commits: list[int] = []
        self.aborts = 0

    def commit(self, version: int) -> None:
        self.commits.append(version)
        super().commit(version)

    def abort(self) -> None:
        self.aborts += 1
        super().abort()


def test_no_engine_finishes_before_the_bytes_of_all_ranks_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.session.ranks.TensorSink", WatchedSink)
    with Threads(World(1, 2)) as threads:
        for future in (threads.join(0), threads.join(1), threads.join(2, wire=TornWire())):
            future.result(timeout=30)
        errors = threads.on_all(lambda node: node.member.refit(1, timeout=20))
        assert all("the last bytes were lost" in str(error) for error in errors)
        for rank in (1, 2):
            sink = threads.nodes[rank].member.sink
            assert (sink.commits, sink.aborts) == ([], 1)
            assert threads.nodes[rank].member.state is EngineState.STALE


@pytest.mark.parametrize(
    ("fact", "there", "here"),
    [("NCCL version", "2.27.3", "2.28.9"), ("NCCL_CUMEM_ENABLE", "1", "unset"), ("planner", "1", "2")],
)
def test_sides_with_different_nccl_settings_are_told_both_values(fact: str, there: str, here: str) -> None:
    def hello(rank: int, role: str, value: str) -> Hello:
        return Hello(rank, role, f"host{rank}", 1, str(rank), "nccl", "cuda", f"host{rank}", {fact: value})

    with pytest.raises(HandshakeError, match=rf"{fact} differs: {there} on trainer rank 0 .*{here} on engine rank 1"):
        check_hellos([hello(0, "trainer", there), hello(1, "engine", here)])


def test_the_line_of_a_refit_says_which_wire_it_used_and_how_fast_each_rank_received() -> None:
    with Threads(World(1, 2, {"transport": "nccl_reshard", "scope": "all", "wire": "gloo"})) as threads:
        for future in [threads.join(rank) for rank in range(3)]:
            future.result(timeout=30)
        report = threads.on_all(lambda node: node.member.refit(1, timeout=20))[0]
    assert "wire=gloo" in report.line() and "GB/s per inference rank" in report.line()
    stored = report.bytes_reshard + report.bytes_broadcast
    assert report.gb_per_second_per_rank == pytest.approx(stored / report.seconds / 2 / 1e9)
    assert Link.NETWORK.name.lower() in report.line()
