"""Runs a refit benchmark: ranks as processes, transports interleaved over rounds, every refit checked and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from .config import BenchConfig
from .methods.base import LOOPBACK, Interfaces
from .methods.make import preload
from .netlab import Counters, Lab, supported
from .predict import predict
from .processes import Ranks
from .worker import Timing, build
from .workload import BenchTensor, tensors_of

LEAD_SECONDS = 0.25
"""From telling all ranks to start until they do: long enough for the message to reach every one."""


class EmulationError(RuntimeError):
    """An emulated cluster was asked for where none can be built. Says what is missing."""


class ContentError(RuntimeError):
    """A refit ended with wrong contents. Names transport, round, rank and tensors."""


@dataclass(frozen=True, slots=True)
class Round:
    """One refit by one transport."""

    seconds: float
    cards: tuple[Counters, ...]
    """What each network card saw; empty without emulation."""
    ranks: dict[int, Timing]


@dataclass(slots=True)
class Measured:
    """All refits by one transport."""

    rounds: list[Round] = field(default_factory=list)
    extra_memory: dict[int, int] = field(default_factory=dict)
    """Bytes per rank, from before it connected until after its first refit."""
    drops: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """The outcome of a run. ``growth`` is what the ranks gained from the second round to the last, at most."""

    config: BenchConfig
    tensors: tuple[BenchTensor, ...]
    emulated: bool
    transports: dict[str, Measured]
    predicted: dict[str, float]
    """Seconds by transport, for those that have a plan."""
    growth: dict[str, int]


def measure(config: BenchConfig, *, emulate: bool, progress: Callable[[str], None] = lambda text: None) -> Measurement:
    """Run every transport of ``config`` in each of its rounds.

    Raises EmulationError where ``emulate`` is not possible, RankError when a rank fails, ContentError for wrong bytes.
    """
    if emulate and (reason := supported()):
        raise EmulationError(f"--emulate: {reason}; without it ranks run on this host alone")
    tensors = tensors_of(config)
    preload(config.transports)
    predicted = predict(config, tensors) if emulate else {}
    with _started(config, tensors, emulate) as (ranks, lab):
        bench = _Bench(config, ranks, lab, progress)
        measured = {name: bench.first_refit(name) for name in config.transports}
        growth = bench.interleaved_rounds(measured)
    return Measurement(config, tensors, emulate, measured, predicted, growth)


@contextmanager
def _started(
    config: BenchConfig, tensors: tuple[BenchTensor, ...], emulate: bool
) -> Iterator[tuple[Ranks, Lab | None]]:
    """Ranks that wait for calls, each in its place; all gone when the block ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="refit-bench-")))
        lab = stack.enter_context(_lab(config)) if emulate else None
        cards = card_of(config)
        interfaces = {rank: _interfaces(config, lab, cards[rank]) for rank in config.world}
        namespaces = {rank: lab.namespace(cards[rank]) for rank in config.world} if lab else None
        make = partial(_build, config, tensors, interfaces, folder)
        yield stack.enter_context(Ranks(config.world, make, namespaces)), lab


def _build(config: BenchConfig, tensors: tuple[BenchTensor, ...], interfaces: dict, folder: Path, rank: int):
    return build(rank, config, tensors, interfaces[rank], folder)


def card_of(config: BenchConfig) -> dict[int, int]:
    """Joint rank -> number of the network card it sends through."""
    if config.cluster.nic == "rank":
        return {rank: number for number, rank in enumerate(config.world)}
    return {rank: number for number, domain in enumerate(config.cluster.domains) for rank in domain}


def _lab(config: BenchConfig) -> Lab:
    cards = card_of(config)
    fast = [[cards[rank] for rank in domain] for domain in config.cluster.domains]
    return Lab(len(set(cards.values())), config.cluster.bits_per_second, fast if config.cluster.nic == "rank" else ())


def _interfaces(config: BenchConfig, lab: Lab | None, card: int) -> Interfaces:
    if lab is None:
        return LOOPBACK
    return Interfaces("nv0" if config.cluster.nic == "rank" else "eth0", "eth0", lab.address(card))


class _Bench:
    """The conversation with the ranks. Every refit carries a version of its own, so stale contents cannot pass."""

    def __init__(self, config: BenchConfig, ranks: Ranks, lab: Lab | None, progress: Callable[[str], None]) -> None:
        self._config, self._ranks, self._lab, self._progress = config, ranks, lab, progress
        self._version = 0

    def first_refit(self, name: str) -> Measured:
        """Connect a transport and run it once untimed: buffers are touched, memory is measured."""
        self._progress(f"{name}: connecting")
        published = self._ranks.call("publish", name)
        self._ranks.call("connect", name, published, seconds=self._config.deadline_seconds)
        self._refit(name)
        return Measured(extra_memory=self._ranks.call("extra_memory", name))

    def interleaved_rounds(self, measured: dict[str, Measured]) -> dict[str, int]:
        before: dict[int, dict[str, int]] = {}
        for number in range(self._config.rounds):
            for name, so_far in measured.items():
                drops = self._lab.drops() if self._lab else 0
                so_far.rounds.append(self._refit(name))
                so_far.drops += (self._lab.drops() if self._lab else 0) - drops
                self._progress(f"round {number + 1} of {self._config.rounds}: {name} {so_far.rounds[-1].seconds:.3f} s")
            before = before or self._ranks.call("resources")
        after = self._ranks.call("resources")
        return {key: max(after[rank][key] - before[rank][key] for rank in after) for key in next(iter(after.values()))}

    def _refit(self, name: str) -> Round:
        self._version += 1
        self._ranks.call("fill", self._version)
        cards = self._lab.counters() if self._lab else ()
        start = time.monotonic() + LEAD_SECONDS
        timings = self._ranks.call("run", name, self._version, start, seconds=self._config.deadline_seconds)
        if self._lab:
            cards = tuple(after.since(before) for before, after in zip(cards, self._lab.counters(), strict=True))
        self._check(name)
        end = max(timings[rank].end for rank in self._config.engines.ranks)
        return Round(end - start, cards, timings)

    def _check(self, name: str) -> None:
        if name == "stream":
            return
        wrong = {rank: names for rank, names in self._ranks.call("wrong", self._version).items() if names}
        if wrong:
            rank, names = next(iter(wrong.items()))
            raise ContentError(
                f"{name}, refit {self._version}: {len(wrong)} ranks hold wrong bytes; "
                f"rank {rank} in {len(names)} tensors, the first is {names[0]}"
            )
