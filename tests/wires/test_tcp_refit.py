"""Refits over the tcp wire end in the right bytes, whatever the layouts, dtypes, strides, links and hops."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from forked_wires import Rank, Ranks
from refit_cases import Case, Tensor, bound_rank, columns, everything, merged, rows

from refit_transport.layout.alignment import PAGE
from refit_transport.runtime.staging import SLOTS

T, E = [0, 1, 2, 3], [4, 5, 6, 7]
SPLIT = ((0, 1, 2, 3), (4, 5, 6, 7))
BIG, ODD = (64, 96), (37, 10)


def tp2_dp2(shape: tuple[int, ...]) -> dict:
    return merged(columns(shape, E[:2]), columns(shape, E[2:]))


ROWS_TO_TP2_DP2 = tuple(Tensor(f"w{i}", BIG, rows(BIG, T), tp2_dp2(BIG)) for i in range(5))
CASES = {
    "rows to columns of two replicas in one domain": Case(ROWS_TO_TP2_DP2, SPLIT, {"bucket_bytes": 20_000}),
    "strided on both sides": Case(ROWS_TO_TP2_DP2, SPLIT, {"bucket_bytes": 20_000}, strided=True),
    "all ranks in one domain": Case(ROWS_TO_TP2_DP2, ((*T, *E),), {"bucket_bytes": 30_000}),
    "every rank its own domain": Case(ROWS_TO_TP2_DP2, tuple((r,) for r in T + E), {"bucket_bytes": 30_000}),
    "to every replica": Case(ROWS_TO_TP2_DP2, SPLIT, {"bucket_bytes": 30_000, "once_per_domain": False}),
    "relayed from domain to domain": Case(
        ROWS_TO_TP2_DP2, ((0, 1, 2, 3), (4, 5), (6, 7)), {"bucket_bytes": 30_000, "relay": "always"}
    ),
    "dtypes side by side": Case(
        tuple(
            Tensor(d, ODD, rows(ODD, T), tp2_dp2(ODD), d)
            for d in (
                "float32",
                "bfloat16",
                "float16",
                "float8_e4m3fn",
                "float8_e5m2",
                "int8",
                "bool",
                "int64",
                "uint8",
            )
        ),
        SPLIT,
        {"bucket_bytes": 4_000},
        strided=True,
    ),
    "casts": Case(
        tuple(
            Tensor(f"{a}-{b}", BIG, rows(BIG, T), tp2_dp2(BIG), a, b)
            for a, b in (("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"))
        ),
        SPLIT,
        {"bucket_bytes": 20_000},
    ),
    "whole tensors, some larger than a bucket": Case(
        (
            Tensor("norm", (7,), everything((7,), T), everything((7,), E), whole=True),
            Tensor("scalar", (), everything((), [0]), everything((), E), whole=True),
            Tensor("embed", (300, 64), rows((300, 64), T), everything((300, 64), E), whole=True),
            Tensor("cast", BIG, rows(BIG, T), columns(BIG, E), "float32", "bfloat16", whole=True),
            Tensor("head", (200, 64), rows((200, 64), T), rows((200, 64), E), whole=True),
            *ROWS_TO_TP2_DP2[:2],
        ),
        SPLIT,
        {"bucket_bytes": 16_000},
    ),
    "whole tensors from one root": Case(
        (
            Tensor("embed", (300, 64), rows((300, 64), T), everything((300, 64), E), whole=True),
            Tensor("norm", (7,), everything((7,), T), everything((7,), E), whole=True),
        ),
        SPLIT,
        {"bucket_bytes": 16_000, "broadcast_root": "single"},
    ),
    "trainers that also serve": Case(
        (Tensor("w", BIG, rows(BIG, T), merged(columns(BIG, [2, 3]), columns(BIG, [4, 5]))),),
        ((0, 1, 2, 3), (4, 5)),
        {"bucket_bytes": 10_000},
    ),
    "three dimensions, experts": Case(
        (Tensor("experts", (8, 12, 10), rows((8, 12, 10), T), merged(*(columns((8, 12, 10), E),))),),
        SPLIT,
        {"bucket_bytes": 3_000},
    ),
}
for name in (
    "rows to columns of two replicas in one domain",
    "relayed from domain to domain",
    "trainers that also serve",
):
    CASES[f"{name}, repacked"] = replace(CASES[name], transient=True)
WIRES = {
    "shared memory": {},
    "sockets": {"shared_memory": False},
    "small chunks, small pieces direct": {"chunk_bytes": 1000, "direct_bytes": 64},
}


def refits(case: Case, versions: int) -> Callable[[Rank], object]:
    """A rank's body: refit, check, wait for the others; reports wrong names, last statistics, memory."""
    plan = case.plan()

    def body(rank: Rank) -> object:
        trained, served, sink, binding = bound_rank(case, plan, rank.rank)
        wire = rank.join()
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
        return found, stats, binding.peak_extra_bytes

    return body


@pytest.mark.parametrize("options", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_destination_holds_exactly_the_new_version(case: Case, options: dict) -> None:
    body = refits(case, 2)
    with Ranks(body, case.domains, len(T), options) as ranks:
        ranks.exchange_endpoints()
        for _ in range(2):
            ranks.barrier()
        results = ranks.results()
    assert {rank: found for rank, (found, _, _) in results.items() if found} == {}
    for link in ("network", "domain", "local"):
        assert sum(s.sent[link] for _, s, _ in results.values()) == sum(
            s.received[link] for _, s, _ in results.values()
        )


def mixed(rank: int) -> dict:
    return {"shared_memory": rank % 4 != 1}


@pytest.mark.parametrize("name", ["rows to columns of two replicas in one domain", "all ranks in one domain"])
def test_ranks_that_cannot_share_memory_use_sockets_with_those_that_can(name: str) -> None:
    case = CASES[name]
    with Ranks(refits(case, 2), case.domains, len(T), mixed) as ranks:
        ranks.exchange_endpoints()
        for _ in range(2):
            ranks.barrier()
        assert {rank: found for rank, (found, _, _) in ranks.results().items() if found} == {}


@pytest.mark.parametrize("moving", [[0], [4], [0, 1, 2, 3, 4, 5, 6, 7]], ids=["a trainer", "an engine", "all"])
def test_tensors_that_moved_between_refits_are_found_again(moving: list[int]) -> None:
    case = CASES["all ranks in one domain"]
    plan = case.plan()

    def body(rank: Rank) -> list[str]:
        trained, served, sink, binding = bound_rank(case, plan, rank.rank)
        wire = rank.join()
        for version in (1, 2, 3):
            if version > 1 and rank.rank in moving:
                trained, served, sink, other = bound_rank(case, plan, rank.rank)
                binding.source, binding.sink, binding.stale = other.source, sink, True
            trained.fill(version)
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            rank.barrier()
        return served.wrong(3)

    with Ranks(body, case.domains, len(T)) as ranks:
        ranks.exchange_endpoints()
        for _ in range(3):
            ranks.barrier()
        assert {rank: found for rank, found in ranks.results().items() if found} == {}


def test_network_carries_every_byte_once_and_staging_stays_in_the_budget() -> None:
    case = CASES["rows to columns of two replicas in one domain"]
    body = refits(case, 1)
    with Ranks(body, case.domains, len(T)) as ranks:
        ranks.exchange_endpoints()
        ranks.barrier()
        results = ranks.results()
    held = sum(t.shape[0] * t.shape[1] * 4 for t in case.tensors)
    assert sum(stats.sent["network"] for _, stats, _ in results.values()) == held
    assert max(extra for _, _, extra in results.values()) <= 2 * case.options["bucket_bytes"] + SLOTS * PAGE


def test_ten_refits_leave_descriptors_and_memory_as_they_were() -> None:
    shape = (512, 1024)
    case = Case(
        tuple(Tensor(f"w{i}", shape, rows(shape, [0, 1]), columns(shape, [2, 3])) for i in range(4)),
        ((0, 1), (2, 3)),
        {"bucket_bytes": 1 << 20},
    )
    plan = case.plan()

    def body(rank: Rank) -> object:
        trained, served, _, binding = bound_rank(case, plan, rank.rank)
        wire = rank.join()
        seen = []
        for version in range(1, 13):
            trained.fill(1)
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            assert not served.wrong(1)
            seen.append((len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            rank.barrier()
        return seen

    with Ranks(body, case.domains, 2) as ranks:
        ranks.exchange_endpoints()
        for _ in range(12):
            ranks.barrier()
        for seen in ranks.results().values():
            assert seen[1][0] == seen[11][0]
            assert seen[11][1] - seen[1][1] < 1024, "kilobytes of growth over ten refits"
