"""The NCCL M2N wire over stand-ins for the library and for NCCL: right bytes by both ways, and its conditions.

The same wire over the real library is in ``tests/gpu``."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import m2n_stand_in
import pytest
import torch
from forked_wires import Rank, slowness
from lost_ranks import Kit, run_and_lose, strike
from m2n_stand_in import RuleBroken
from nccl_stand_in import Group, HostQueue, note_copies
from refit_cases import Case, Tensor, bound_rank, columns, contents, everything, merged, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T, join, run_refits

from refit_transport.planning.m2n import Geometry, SideMesh
from refit_transport.session.totals import expected_of
from refit_transport.wires.base import WireError
from refit_transport.wires.m2n import M2nWire
from refit_transport.wires.m2n_library import Library, loaded_nccl, missing, staging_of

CUBE = (4, 6, 8)
MIXED = Case(
    (
        *(Tensor(f"rows{i}", WIDE, rows(WIDE, T), columns(WIDE, E), "bfloat16") for i in range(5)),
        *(Tensor(f"experts{i}", CUBE, rows(CUBE, T), columns(CUBE, E), "float8_e4m3fn") for i in range(3)),
        Tensor("to every rank", WIDE, rows(WIDE, T), everything(WIDE, E)),
        Tensor("from replicas", WIDE, everything(WIDE, T), columns(WIDE, E)),
        Tensor("cast", WIDE, rows(WIDE, T), columns(WIDE, E), "float32", "bfloat16"),
        Tensor("uneven", (7, 10), rows((7, 10), T), columns((7, 10), E)),
        Tensor("short", WIDE, rows(WIDE, T), columns(WIDE, E), "int16"),
        Tensor("norm", (7,), everything((7,), T), everything((7,), E), whole=True),
    ),
    TWO_DOMAINS,
    {"bucket_bytes": 3_000},
)
STRIDED = Case(MIXED.tensors, TWO_DOMAINS, {"bucket_bytes": 3_000}, strided=True)
ALL_M2N = {
    name: CASES[name] for name in ("one hop", "one hop, strided", "one bucket", "casts", "one hop, engines that repack")
}
REPLICAS = Case(
    tuple(Tensor(f"w{i}", WIDE, rows(WIDE, T), merged(columns(WIDE, [2, 3]), columns(WIDE, [4, 5]))) for i in range(4)),
    ((0, 1), (2, 3, 4, 5)),
    {"bucket_bytes": 2_000},
)


def library() -> Library:
    return Library(m2n_stand_in, m2n_stand_in)


def m2n_wire() -> M2nWire:
    queue = HostQueue()
    return M2nWire(queue=queue, group_maker=partial(Group, queue=queue), library=library)


@pytest.fixture(autouse=True)
def meeting(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("M2N_STAND_IN_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("NCCL_RESHARD_PACK_BUFFSIZES", raising=False)


def refits_with_wires(case: Case) -> Callable[[Rank], object]:
    """A rank's body: two refits; returns what was wrong, statistics against the plan's, wires and recorded calls."""
    plan = case.plan()
    for tensor in case.tensors:
        for version in (1, 2):
            contents(case, tensor.name, version)

    def body(rank: Rank) -> object:
        trained, served, sink, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, m2n_wire())
        found = []
        for version in (1, 2):
            trained.fill(version)
            binding.begin(version)
            stats = wire.run(binding, version, time.monotonic() + 20)
            if sink is not None:
                sink.commit(version)
            found += served.wrong(version)
            rank.barrier()
        planned = expected_of(binding.program, frozenset())
        assert (stats.sent, stats.received) == (planned.sent, planned.received)
        assert binding.peak_extra_bytes > 0
        wires = {name: wire for name, (wire, _) in wire.wires_by_parameter().items()}
        return found, wires, m2n_stand_in.handles[0].calls

    return body


@pytest.mark.parametrize("case", [MIXED, STRIDED, REPLICAS, *ALL_M2N.values()])
def test_every_destination_holds_exactly_the_new_version_by_either_way(case: Case) -> None:
    results = run_refits(case, m2n_wire, body=refits_with_wires(case))
    assert {rank: found for rank, (found, _, _) in results.items() if found} == {}
    _, wires, calls = results[0]
    assert all((wires, calls) == result[1:] for result in results.values())
    expected = {"uneven": "nccl", "short": "nccl", "norm": "nccl"}
    assert wires == {t.name: expected.get(t.name, "nccl_m2n") for t in case.tensors}


def test_members_of_equal_geometry_share_a_call() -> None:
    _, _, calls = run_refits(MIXED, m2n_wire, body=refits_with_wires(MIXED))[0]
    stacked = [call["shape"][0] for call in calls[: len(calls) // 2] if call["src"][1] == "bfloat16"]
    assert sum(stacked) == 6 and len(stacked) == 1  # five and the cast one, which travels in bfloat16


def test_once_per_domain_with_forwarding_is_left_to_the_library() -> None:
    case = CASES["once per domain: the second hop forwards"]
    results = run_refits(case, m2n_wire, body=refits_with_wires(case))
    assert {rank: found for rank, (found, _, _) in results.items() if found} == {}


def test_the_choice_is_logged_once_as_one_line(caplog) -> None:
    case = MIXED
    plan = case.plan()

    def body(rank: Rank) -> object:
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("refit_transport").addHandler(handler)
        logging.getLogger("refit_transport").setLevel(logging.INFO)
        *_, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, m2n_wire())
        for version in (1, 2):
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            rank.barrier()
        return lines

    results = run_refits(case, m2n_wire, body=body)
    (line,) = results[0]
    assert re.match(
        r"wire nccl_m2n: 11 parameters \(\S+ MB\) over nccl_m2n, 3 parameters \(\S+ MB\) over nccl \(", line
    )
    assert "1 because dtype int16" in line and results[1] == results[2] == results[3] == []


KIT = Kit(m2n_wire)


def in_a_call(rank: Rank, wire: M2nWire, sent: int) -> None:
    wire._library.reshard = lambda *_: strike(rank, sent)


def after_the_calls(rank: Rank, wire: M2nWire, sent: int) -> None:
    wire._p2p.exchange = lambda *_: strike(rank, sent)


def test_a_rank_lost_in_a_call_ends_in_an_error_that_says_to_restart() -> None:
    for ended in run_and_lose(KIT, MIXED, signal.SIGKILL, 20.0, in_a_call):
        assert ended.seconds < 2.0 * slowness() and ended.phase == "m2n"
        assert "engine rank 3 was lost" in ended.text and "restart this process" in ended.text


BIG, ODD = (256, 512), (255, 511)
STAGED = Case(
    (
        *(Tensor(f"w{i}", BIG, rows(BIG, T), columns(BIG, E)) for i in range(8)),
        *(Tensor(f"uneven{i}", ODD, rows(ODD, T), columns(ODD, E)) for i in range(4)),
    ),
    TWO_DOMAINS,
    {"bucket_bytes": 1 << 20},
    strided=True,
)


def test_calls_the_library_and_the_rest_stage_two_buckets_at_most() -> None:
    plan = STAGED.plan()

    def body(rank: Rank) -> tuple[list[str], int, int, set[str]]:
        trained, served, _, binding = bound_rank(STAGED, plan, rank.rank)
        wire = join(rank, m2n_wire())
        for version in (1, 2):
            trained.fill(version)
            binding.begin(version)
            wire.run(binding, version, time.monotonic() + 20)
            rank.barrier()
        wires = {name for name, _ in wire.wires_by_parameter().values()}
        return served.wrong(2), binding.peak_extra_bytes, wire._library.staged_bytes, wires

    for wrong, staged, of_library, wires in run_refits(STAGED, m2n_wire, body=body).values():
        assert not wrong and wires == {"nccl", "nccl_m2n"}
        assert of_library < staged <= 1.05 * 2 * STAGED.options["bucket_bytes"]


def test_a_call_that_is_not_made_is_not_counted() -> None:
    case = ALL_M2N["casts"]
    plan = case.plan()

    def body(rank: Rank) -> tuple[int, int]:
        *_, binding = bound_rank(case, plan, rank.rank)
        wire = join(rank, m2n_wire())
        binding.begin(1)
        counted = [sum(wire.run(binding, 1, time.monotonic() + 20).received.values())]
        wire._stacks = wire._stacks[:-1]
        binding.begin(2)
        counted.append(sum(wire.run(binding, 2, time.monotonic() + 20).received.values()))
        rank.barrier()
        return tuple(counted)

    results = run_refits(case, m2n_wire, 1, body)
    assert all(results[rank][0] > results[rank][1] for rank in E)


def test_calls_and_the_rest_hand_over_their_memory_by_events() -> None:
    plan = MIXED.plan()

    def body(rank: Rank) -> str:
        trained, _, _, binding = bound_rank(MIXED, plan, rank.rank)
        wire = join(rank, m2n_wire())
        note_copies(wire._queue, pytest.MonkeyPatch())
        reshard = wire._library.reshard

        def noted(geometry, members, source, sink, stream) -> None:
            for buffer, write in ((source, False), (sink, True)):
                if buffer is not None:
                    wire._queue.use(buffer, write=write)
            reshard(geometry, members, source, sink, stream)

        wire._library.reshard = noted
        try:
            for version in (1, 2, 3):
                trained.fill(version)
                binding.begin(version)
                wire.run(binding, version, time.monotonic() + 20)
        except (RuleBroken, WireError) as error:
            return str(error)
        finally:
            rank.barrier()
        return ""

    assert set(run_refits(MIXED, m2n_wire, 1, body).values()) == {""}


class Never:
    """The end of a call that a lost peer holds up on the device."""

    def __init__(self) -> None:
        self.clock: Counter[str] = Counter()

    def query(self) -> bool:
        return False


def held_up_on_the_device(rank: Rank, wire: M2nWire, sink: object) -> None:
    """Calls are queued, their ends never come, and an engine that loads fails the test."""
    wire._library.reshard = lambda *_: None
    wire._queue.mark = Never
    if sink is not None:
        sink.arrived = lambda direct, whole: pytest.fail(f"{direct} were loaded behind a call that waits")


def test_a_stopped_peer_is_named_at_the_deadline_and_nothing_is_loaded_behind_its_call() -> None:
    for ended in run_and_lose(KIT, MIXED, signal.SIGSTOP, 2.0, in_a_call, held_up_on_the_device):
        assert 2.0 <= ended.seconds < 2.0 + 3.0 * slowness() and (ended.peer, ended.phase) == (3, "m2n")
        assert re.search(r"deadline passed in the call of \d+ parameters from .* waiting for engine rank 3", ended.text)
        assert "restart this process" in ended.text


def test_a_rank_lost_after_the_calls_needs_no_restart() -> None:
    for ended in run_and_lose(KIT, MIXED, signal.SIGKILL, 20.0, after_the_calls):
        assert ended.seconds < 2.0 * slowness() and ended.text == "engine rank 3 was lost"


@pytest.mark.parametrize(
    "sizes, nbytes", [("2k:1", 2048), ("8k:2,1m", 16384 + (4 << 20)), ("256m:1", 256 << 20), ("4096:3", 12288)]
)
def test_what_the_library_stages_is_read_from_its_own_setting(sizes: str, nbytes: int) -> None:
    assert sum(size * slots for size, slots in staging_of(sizes).items()) == nbytes


def test_a_plan_with_larger_calls_than_the_library_is_ready_for_is_refused() -> None:
    opened = library()
    opened.open(5000)
    opened.open(4000)
    assert opened.staged_bytes == 5 << 10
    with pytest.raises(WireError, match="ready for calls of 5000 bytes, this plan has larger ones"):
        opened.open(5001)


def test_each_session_of_a_process_makes_the_library_ready_for_its_own_calls() -> None:
    for call_bytes in (5000, 9000):
        opened = library()
        opened.open(call_bytes)
        assert opened.staged_bytes >= call_bytes
        opened.close()


def test_staging_that_the_user_set_too_small_for_the_calls_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_RESHARD_PACK_BUFFSIZES", "2k:1")
    library().open(2048)
    with pytest.raises(WireError, match=r"NCCL_RESHARD_PACK_BUFFSIZES is 2k:1, .*calls of 2049 bytes"):
        library().open(2049)


@pytest.mark.parametrize(
    "without, reason",
    [
        ({"nccl": lambda: "torch sees no CUDA device"}, "no CUDA device"),
        ({"installed": lambda: False}, r"`nccl.m2n` is not installed \(pip install 'refit-transport\[m2n\]'\)"),
        ({"version": lambda: (2, 28, 9)}, "torch runs NCCL 2.28.9; M2N needs 2.30.5 or newer"),
    ],
)
def test_what_is_missing_is_said(without: dict, reason: str) -> None:
    there = {"nccl": lambda: None, "installed": lambda: True, "version": lambda: (2, 30, 7)}
    assert missing(**there) is None
    assert re.search(reason, missing(**there, **{}) or missing(**{**there, **without}))


def test_memory_without_cumem_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert "NCCL_CUMEM_ENABLE is 0" in missing(lambda: None, lambda: (2, 30, 7), lambda: True)


def test_two_loaded_libraries_are_found() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 12 /venv/nvidia/nccl/lib/libnccl.so.2\n"
        "7f01-7f02 r--p 00001000 08:01 12 /venv/nvidia/nccl/lib/libnccl.so.2\n"
        "7f03-7f04 r-xp 00000000 08:01 13 /usr/lib/x86_64-linux-gnu/libnccl.so.2.30.7\n"
        "7f05-7f06 r-xp 00000000 08:01 14 /venv/nccl/m2n/lib/cu12/libnccl_m2n.so\n"
    )
    assert loaded_nccl(maps) == [
        "/usr/lib/x86_64-linux-gnu/libnccl.so.2.30.7",
        "/venv/nvidia/nccl/lib/libnccl.so.2",
    ]


@pytest.mark.parametrize(
    "buffer, shape, dtype, dims, placements, rule",
    [
        (torch.zeros(4, 4)[:, :2], (4, 2), "float32", (2,), [m2n_stand_in.Shard(0)], "not contiguous"),
        (torch.zeros(4, 4), (4, 2), "float32", (2,), [m2n_stand_in.Shard(0)], "said"),
        (None, (1, 2, 3, 4), "float32", (2,), [m2n_stand_in.Shard(0)], "rank 4"),
        (None, (4,), "bool", (2,), [m2n_stand_in.Shard(0)], "dtype"),
        (None, (4,), "int8", (2, 2), [m2n_stand_in.Shard(0), m2n_stand_in.Shard(0)], "two sharded axes"),
        (None, (4,), "int8", (2, 2, 2), [m2n_stand_in.Shard(0)], "mesh"),
    ],
)
def test_the_stand_in_refuses_what_the_library_forbids(buffer, shape, dtype, dims, placements, rule) -> None:
    with pytest.raises(RuleBroken, match=rule):
        m2n_stand_in.DistTensor(buffer, shape, dtype, mesh=m2n_stand_in.Mesh(dims), placements=placements)


@pytest.mark.parametrize(
    "rank, parts", [(0, (True, False)), (1, (True, False)), (2, (False, True)), (4, (False, False))]
)
def test_the_real_package_reads_the_calls_as_they_are_meant(rank: int, parts: tuple[bool, bool]) -> None:
    """Only its descriptions of tensors: they need no GPU."""
    m2n = pytest.importorskip("nccl.m2n", reason="needs pip install 'refit-transport[m2n]'")
    geometry = Geometry((1, 12, 8), "bfloat16", SideMesh(0, (2,), 0, 1), SideMesh(2, (2,), 0, 2))
    real, sides = Library(m2n, m2n_stand_in), (geometry.source, geometry.sink)
    for side, dim, there in zip(sides, (1, 2), parts):
        shape = geometry.local_shape(side, 5)
        buffer = torch.zeros(shape, dtype=torch.bfloat16) if there else None
        described = real._described(geometry, side, 5, buffer)
        assert described.is_participating is there
        assert described.local_shape == shape and described.ndims == 3
        assert (described.mesh.dims[0], described.mesh.start_rank) == (2, side.start)
        assert (
            described.placements[0]
            == m2n.DistTensor(
                None, shape, "bfloat16", mesh=m2n.Mesh((2,), side.start), placements=[m2n.Shard(dim)]
            ).placements[0]
        )
        assert described.dtype.name.lower().startswith("bfloat16")
