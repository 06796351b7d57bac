"""Refits among few ranks that take every way through a wire that runs bucket after bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from forked_wires import Rank, Ranks
from refit_cases import Case, Tensor, bound_rank, columns, contents, everything, merged, rows

from refit_transport.wires.base import Wire, WireStats

T, E = [0, 1], [2, 3]
TWO_DOMAINS = ((0, 1), (2, 3))
WIDE, ODD = (16, 24), (7, 10)
MATRICES = tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), columns(WIDE, E)) for i in range(4))
REPLICAS = tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), everything(WIDE, E)) for i in range(4))
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "bool", "int64", "int16")

CASES = {
    "one hop": Case(MATRICES, TWO_DOMAINS, {"bucket_bytes": 3_000}),
    "one hop, strided": Case(MATRICES, TWO_DOMAINS, {"bucket_bytes": 3_000}, strided=True),
    "one bucket": Case(MATRICES, TWO_DOMAINS),
    "once per domain: the second hop forwards": Case(REPLICAS, TWO_DOMAINS, {"bucket_bytes": 4_000}),
    "relay and fan-out: three hops": Case(
        tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), everything(WIDE, [2, 3, 4, 5])) for i in range(4)),
        ((0, 1), (2, 3), (4, 5)),
        {"bucket_bytes": 6_000, "relay": "always", "stripe_bytes": 64},
    ),
    "dtypes side by side": Case(
        tuple(Tensor(d, ODD, rows(ODD, T), merged(columns(ODD, E)), d) for d in DTYPES),
        TWO_DOMAINS,
        {"bucket_bytes": 800},
        strided=True,
    ),
    "casts": Case(
        (
            Tensor("down", WIDE, rows(WIDE, T), columns(WIDE, E), "float32", "bfloat16"),
            Tensor("up", WIDE, rows(WIDE, T), columns(WIDE, E), "bfloat16", "float32"),
        ),
        TWO_DOMAINS,
        {"bucket_bytes": 3_000},
    ),
    "whole tensors, one over several buckets": Case(
        (
            Tensor("norm", (7,), everything((7,), T), everything((7,), E), whole=True),
            Tensor("scalar", (), everything((), [0]), everything((), E), whole=True),
            Tensor("embed", (40, 24), rows((40, 24), T), everything((40, 24), E), whole=True),
            *MATRICES[:2],
        ),
        TWO_DOMAINS,
        {"bucket_bytes": 3_000},
    ),
    "a trainer that also serves": Case(
        (Tensor("w", WIDE, rows(WIDE, T), columns(WIDE, [1, 2, 3])),), TWO_DOMAINS, {"bucket_bytes": 2_000}
    ),
    "a rank without a part": Case((Tensor("w", WIDE, rows(WIDE, [0]), columns(WIDE, [2])),), TWO_DOMAINS),
}
CASES["one hop, engines that repack"] = replace(CASES["one hop"], transient=True)
CASES["engines that repack, three hops"] = replace(CASES["relay and fan-out: three hops"], transient=True)
CASES["engines that repack and keep whole tensors"] = replace(
    CASES["whole tensors, one over several buckets"], transient=True
)


def join(rank: Rank, wire: Wire, seconds: float = 20.0) -> Wire:
    """``wire``, connected with those of all other ranks."""
    rank.pipe.send(("endpoint", (os.getpid(), wire.listen(rank.rank))))
    wire.connect(rank.rank, rank.peers(rank.pipe.recv()), time.monotonic() + seconds)
    return wire


def refits(case: Case, make: Callable[[], Wire], versions: int = 2) -> Callable[[Rank], object]:
    """A rank's body: refit and check ``versions`` times; returns what was wrong and the last statistics."""
    plan = case.plan()
    for tensor in case.tensors:
        for version in range(1, versions + 1):
            contents(case, tensor.name, version)

    def body(rank: Rank) -> tuple[list[str], WireStats]:
        trained, served, sink, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, make())
        found = []
        for version in range(1, versions + 1):
            trained.fill(version)
            binding.begin(version)
            stats = wire.run(binding, version, time.monotonic() + 20)
            if sink is not None:
                sink.commit(version)
            found += [f"version {version}: {name}" for name in served.wrong(version)]
            rank.barrier()
        wire.close()
        return found, stats

    return body


def run_refits(
    case: Case, make: Callable[[], Wire], versions: int = 2, body: Callable[[Rank], object] | None = None
) -> dict[int, object]:
    """What each rank returned."""
    with Ranks(body or refits(case, make, versions), case.domains, len(T)) as ranks:
        ranks.exchange_endpoints()
        for _ in range(versions):
            ranks.barrier()
        return ranks.results()
