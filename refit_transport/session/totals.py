"""What each rank counted in a refit, and how the counts of all ranks become one report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from refit_transport.planning.program import Program
from refit_transport.wires.base import WireStats

from .errors import RefitError
from .report import RefitReport


class Expected(msgspec.Struct, frozen=True):
    """What one rank's program will move in every refit, in bytes."""

    sent: dict[str, int]
    received: dict[str, int]
    reshard: int
    """Stored by this rank from the reshard path."""
    broadcast: int


class RankTotals(msgspec.Struct, frozen=True):
    """One rank's counts of one refit."""

    role: str
    seconds: float
    expected: Expected
    messages: int
    peak_extra_bytes: int
    phases: dict[str, float]


def expected_of(program: Program, whole: frozenset[int]) -> Expected:
    """Totals of ``program``; ``whole`` are the parameters (indices) that take the broadcast path on this rank."""
    sent, received = {"network": 0, "domain": 0, "local": 0}, {"network": 0, "domain": 0, "local": 0}
    table = program.pieces
    on_broadcast = np.isin(table.parameter, np.fromiter(whole, np.int64, len(whole)))
    stored = {False: 0, True: 0}

    def store(first: int, last: int) -> None:
        for path in stored:
            rows = table.wanted[first:last] & (on_broadcast[first:last] == path)
            stored[path] += int(table.nbytes[first:last][rows].sum())

    for bucket in program.buckets:
        for message in bucket.sends:
            sent[message.link.name.lower()] += message.nbytes
        for message in bucket.recvs:
            received[message.link.name.lower()] += message.nbytes
            store(message.first, message.last)
        first, last = bucket.local
        sent["local"] += (count := int(table.nbytes[first:last].sum()))
        received["local"] += count
        store(first, last)
    return Expected(sent, received, stored[False], stored[True])


def check_counts(stats: WireStats, expected: Expected, who: str) -> None:
    """The wire moved exactly what the plan says. Raises RefitError naming the link class and both counts."""
    for direction, counted, planned in (
        ("sent", stats.sent, expected.sent),
        ("received", stats.received, expected.received),
    ):
        for link, count in planned.items():
            if counted.get(link, 0) != count:
                raise RefitError(f"{who} {direction} {counted.get(link, 0)} bytes over {link}; its plan says {count}")


def merge_totals(
    totals: Sequence[RankTotals], *, version: int, transport: str, wire: str, unchanged_since: int | None = None
) -> RefitReport:
    """The report of all ranks: bytes summed over inference ranks, seconds as the maximum over ranks."""
    engines = [t for t in totals if t.role == "engine"]
    phases: dict[str, float] = {}
    for rank in totals:
        for name, seconds in rank.phases.items():
            phases[name] = max(phases.get(name, 0.0), seconds)
    return RefitReport(
        version=version,
        transport=transport,
        wire=wire,
        seconds=max(t.seconds for t in totals),
        phases=phases,
        bytes_reshard=sum(t.expected.reshard for t in engines),
        bytes_broadcast=sum(t.expected.broadcast for t in engines),
        bytes_network=sum(t.expected.received["network"] for t in totals),
        bytes_domain=sum(t.expected.received["domain"] for t in totals),
        bytes_local=sum(t.expected.received["local"] for t in totals),
        messages=sum(t.messages for t in totals),
        peak_extra_bytes=max(t.peak_extra_bytes for t in totals),
        engine_ranks=len(engines),
        unchanged_since=unchanged_since,
    )
