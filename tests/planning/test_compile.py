"""A rank's program: what lies where in a message, and in which order messages start."""

from __future__ import annotations

import numpy as np
import pytest

from refit_transport.layout import Replicate, Shard
from refit_transport.layout.layout import Entry, Layout, LogicalParameter, SideDescription
from refit_transport.planning import Plan, PlanOptions, Program, check_plan, compile_program, plan_refit
from tests.planning.sides import FINE, on_mesh, planned

COPY, ROWS = [Replicate()], [Shard(0)]


@pytest.fixture(scope="module")
def exchange() -> Plan:
    """Two trainers to three replicas in one domain: stripes over the network, then all to all inside."""
    source = {f"layers.{i}.{kind}": on_mesh((12, 6), [0, 1], ROWS) for i in range(3) for kind in ("up", "down")}
    sink = {name: on_mesh((12, 6), [2, 3, 4], COPY) for name in source}
    return planned(source, sink, [[0, 1], [2, 3, 4]])


def test_all_pieces_for_one_peer_and_hop_travel_in_one_message(exchange: Plan) -> None:
    for rank in exchange.world:
        for bucket in compile_program(exchange, rank).buckets:
            for messages in (bucket.sends, bucket.recvs):
                assert len({(m.peer, m.hop) for m in messages}) == len(messages)


def test_what_goes_on_to_a_sibling_lies_together_in_the_received_message(exchange: Plan) -> None:
    for rank in (2, 3, 4):
        program = compile_program(exchange, rank)
        for bucket in program.buckets:
            for message in (m for m in bucket.sends if m.hop > 0):
                rows = program.pieces.origin[message.first : message.last]
                source = {next(m.peer for m in bucket.recvs if m.first <= row < m.last) for row in rows}
                assert runs(program, message.first, message.last) <= len(source)


def runs(program: Program, first: int, last: int) -> int:
    """Contiguous stretches of received bytes that rows ``[first, last)`` forward."""
    return 1 + int((np.diff(program.pieces.origin[first:last]) != 1).sum())


def test_pieces_of_large_items_come_first_so_that_all_are_aligned() -> None:
    layouts = {name: on_mesh((5,), [0], COPY) for name in "abcd"}
    dtypes = dict(zip("abcd", ("uint8", "float32", "bfloat16", "int64")))
    parameters = [LogicalParameter(name, (5,), dtypes[name]) for name in layouts]
    held = SideDescription((layouts["a"],), tuple(Entry(n, dtypes[n], 0) for n in layouts))
    need = SideDescription((on_mesh((5,), [1], COPY),), tuple(Entry(n, dtypes[n], 0) for n in layouts))
    plan = plan_refit(held, need, parameters, [[0], [1]])
    check_plan(plan, held, need)
    pieces = compile_program(plan, 1).pieces
    assert [plan.parameters[p].name for p in pieces.parameter] == ["d", "b", "c", "a"]
    assert pieces.offset.tolist() == [0, 40, 60, 70]


def test_sources_start_with_different_peers() -> None:
    source, sink = on_mesh((16, 16), range(4), ROWS), on_mesh((16, 16), range(4, 8), [Shard(1)])
    plan = planned({"w": source}, {"w": sink}, [range(4), range(4, 8)])
    firsts = [compile_program(plan, rank).buckets[0].sends[0].peer for rank in range(4)]
    assert sorted(firsts) == [4, 5, 6, 7]


def test_a_rank_without_a_part_has_an_empty_program() -> None:
    plan = planned({"w": on_mesh((4,), [0], COPY)}, {"w": on_mesh((4,), [2], COPY)}, [[0], [1], [2]])
    program = compile_program(plan, 1)
    assert len(program.pieces) == 0
    assert all(not bucket.sends and not bucket.recvs for bucket in program.buckets)
    assert program.digest == plan.digest


def test_transfers_read_as_a_sequence_and_as_columns(exchange: Plan) -> None:
    table = exchange.groups[0].transfers
    assert len(list(table)) == len(table) == len(table.src)
    assert [t.src for t in table] == table.src.tolist()
    assert all(t.region.numel == n for t, n in zip(table, table.numel.tolist()))
    with pytest.raises(IndexError):
        table[len(table)]


def test_the_golden_check_notices_a_lost_transfer() -> None:
    from dataclasses import replace

    from refit_transport.planning import PlanError, TransferTable

    layouts = {"w": on_mesh((8,), [0, 1], ROWS)}, {"w": on_mesh((8,), [2], COPY)}
    plan = planned(*layouts, [[0, 1], [2]], FINE)
    group = plan.groups[0]
    lost = TransferTable(*(getattr(group.transfers, name)[1:] for name in TransferTable.__slots__))
    broken = replace(plan, groups=(replace(group, transfers=lost),))
    held, need = (SideDescription((d["w"],), (Entry("w", "bfloat16", 0),)) for d in layouts)
    with pytest.raises(PlanError, match=r"w: element \[0\] on rank 2 is never written"):
        check_plan(broken, held, need)


def test_empty_parameters_need_no_transfer() -> None:
    empty = Layout((0, 4), ())
    plan = planned({"w": empty}, {"w": empty}, [[0], [1]], PlanOptions())
    assert len(plan.groups[0].transfers) == 0
