"""Forks one process per rank, gives each a wire, and collects what they report. Used by the tests of the wires."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from refit_transport.wires.base import Peer
from refit_transport.wires.tcp import TcpWire

FORK = multiprocessing.get_context("fork")


def slowness() -> float:
    """1 on a machine that does little else. Where more processes wait for a core, a rank may be silent only because it
    waits for its turn, and limits grow with the queue."""
    with open("/proc/loadavg") as loadavg:
        last_minute, _, _, running, _ = loadavg.read().split()
    queue = max(float(last_minute), int(running.partition("/")[0])) / os.cpu_count()
    return max(1.0, queue / 2)


@dataclass
class Rank:
    """What a rank's body gets."""

    rank: int
    pipe: Connection
    domains: tuple[tuple[int, ...], ...]
    trainers: int
    options: dict

    def join(
        self,
        seconds: float = 20.0,
        before_connect: Callable[[dict], None] = lambda endpoint: None,
        alter: Callable[[dict], None] | None = None,
    ) -> TcpWire:
        """A wire that is connected with all other ranks. ``alter`` changes the endpoints that this rank is told."""
        wire = TcpWire(**self.options)
        self.own_endpoint = wire.listen(self.rank)
        self.pipe.send(("endpoint", (os.getpid(), self.own_endpoint)))
        endpoints = self.pipe.recv()
        if alter is not None:
            alter(endpoints)
        before_connect(self.own_endpoint)
        wire.connect(self.rank, self.peers(endpoints), time.monotonic() + seconds)
        return wire

    def listen_and_leave(self) -> None:
        """Publish an endpoint, then close it."""
        wire = TcpWire(**self.options)
        endpoint = wire.listen(self.rank)
        wire.close()
        self.pipe.send(("endpoint", (os.getpid(), endpoint)))
        self.pipe.recv()

    def barrier(self) -> None:
        """Wait until the test says that all ranks came this far."""
        self.pipe.send(("here", None))
        self.pipe.recv()

    def peers(self, endpoints: dict[int, tuple[int, dict]]) -> list[Peer]:
        domain = {rank: number for number, ranks in enumerate(self.domains) for rank in ranks}
        return [
            Peer(r, "trainer" if r < self.trainers else "engine", "localhost", domain[r], pid, f"{pid}", endpoint)
            for r, (pid, endpoint) in endpoints.items()
        ]


class Ranks:
    """The ranks of a test, seen from its own process."""

    def __init__(
        self,
        body: Callable[[Rank], object],
        domains: tuple[tuple[int, ...], ...],
        trainers: int,
        options: Callable[[int], dict] | dict | None = None,
        enter: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.pipes: dict[int, Connection] = {}
        self.processes = {}
        self._domains, self._trainers, self._options, self._enter = domains, trainers, options, enter
        for rank in sorted(r for d in domains for r in d):
            self._start(rank, body)
        self.first_pids = {rank: process.pid for rank, process in self.processes.items()}

    def replace(self, rank: int, body: Callable[[Rank], object]) -> None:
        """A new process in the place of one that died."""
        self.processes[rank].join(5)
        self.pipes[rank].close()
        self._start(rank, body)

    def _start(self, rank: int, body: Callable[[Rank], object]) -> None:
        here, there = FORK.Pipe()
        options = self._options(rank) if callable(self._options) else dict(self._options or {})
        what = Rank(rank, there, self._domains, self._trainers, options)
        process = FORK.Process(target=_main, args=(body, what, self._enter))
        process.start()
        there.close()
        self.pipes[rank], self.processes[rank] = here, process

    def exchange_endpoints(self, ranks: list[int] | None = None) -> dict:
        chosen = ranks if ranks is not None else list(self.pipes)
        endpoints = {rank: self.expect(rank, "endpoint") for rank in chosen}
        for rank in chosen:
            self.pipes[rank].send(endpoints)
        return endpoints

    def barrier(self, ranks: list[int] | None = None) -> None:
        """Wait for the ranks at their barrier, then let them go on."""
        chosen = ranks if ranks is not None else list(self.pipes)
        for rank in chosen:
            self.expect(rank, "here")
        for rank in chosen:
            self.pipes[rank].send(None)

    def expect(self, rank: int, kind: str, seconds: float = 30.0) -> object:
        """The next report of a rank, which must be of this kind."""
        if not self.pipes[rank].poll(seconds):
            raise AssertionError(f"rank {rank} did not report {kind} within {seconds} s")
        got, value = self.pipes[rank].recv()
        assert got == kind, f"rank {rank} reported {got} instead of {kind}:\n{value}"
        return value

    def results(self, ranks: list[int] | None = None, seconds: float = 30.0) -> dict[int, object]:
        return {rank: self.expect(rank, "result", seconds) for rank in (ranks if ranks is not None else self.pipes)}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(5)
        for pipe in self.pipes.values():
            pipe.close()


def _main(body: Callable[[Rank], object], rank: Rank, enter: Callable[[int], None]) -> None:
    # A forked process makes torch's thread pool anew at the first use. Threads that are first together find none.
    torch.set_num_threads(1)
    try:
        enter(rank.rank)
        rank.pipe.send(("result", body(rank)))
    except BaseException:
        rank.pipe.send(("exception", traceback.format_exc()))
    os._exit(0)
