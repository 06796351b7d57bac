"""One rank's side of M2N's calls, without a library: what is stacked where, counted as what, and loaded when."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from nccl_stand_in import Group, HostQueue
from refit_cases import Case, Tensor, bound_rank, columns, merged, rows
from small_cases import CASES, E, T

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.layout import Entry, LogicalParameter, SideDescription
from refit_transport.layout.region import Region
from refit_transport.layout.sharding import region_layout
from refit_transport.planning import Plan, compile_program, plan_refit
from refit_transport.planning.m2n import choose_wires, communicator_order, make_stacks, without_m2n
from refit_transport.runtime.binding import Binding
from refit_transport.session.totals import expected_of
from refit_transport.trainers.tensors import TensorSource
from refit_transport.wires.base import WireStats
from refit_transport.wires.m2n import M2nWire, _Calls
from refit_transport.wires.m2n_stack import BoundStack, bind_stacks

LONG, CUBE = (4, 48), (4, 6, 8)
PLACE = communicator_order(T, E)


def stacks_of(plan: Plan, shapes: dict[str, tuple[int, ...]], binding: Binding) -> tuple[BoundStack, ...]:
    sources = [region_layout(g.shape, rows(shapes[plan.parameters[g.members[0]].name], T)) for g in plan.groups]
    choices = choose_wires(plan, sources, PLACE)
    pool = torch.zeros(1 << 16, dtype=torch.uint8)
    return bind_stacks(binding, make_stacks(plan, choices), PLACE[binding.rank], pool)


def test_parameters_of_different_shapes_share_a_call_each_in_its_own_shape() -> None:
    case = Case(
        (
            Tensor("matrix", LONG, rows(LONG, T), rows(LONG, E)),
            Tensor("cube", CUBE, rows(CUBE, T), rows(CUBE, E)),
        ),
        ((0, 1), (2, 3)),
    )
    plan, shapes = case.plan(), {t.name: t.shape for t in case.tensors}
    trained, *_, binding = bound_rank(case, plan, 0)
    trained.fill(1)
    (sent,) = stacks_of(plan, shapes, binding)
    sent.pack.run()
    held = {name: tensor.flatten() for name, [(_, tensor)] in trained.held.items()}
    assert torch.equal(sent.source.view(2, -1), torch.stack([held[name] for name in sent.names]))
    _, served, _, binding = bound_rank(case, plan, 2)
    (received,) = stacks_of(plan, shapes, binding)
    received.sink.copy_(sent.source)
    received.unpack.run()
    assert served.wrong(1) == []


def test_a_parameter_that_some_engines_hold_directly_and_others_whole_goes_and_counts_both_ways() -> None:
    shape = (8, 6)
    held, direct = rows(shape, T), columns(shape, [2])
    layouts = [region_layout(shape, at) for at in (held, direct, columns(shape, [3]))]
    plan = plan_refit(
        SideDescription(tuple(layouts[:1]), (Entry("w", "float32", 0),)),
        SideDescription(tuple(layouts[1:]), (Entry("w", "float32", 0), Entry("w", "float32", 1, True))),
        [LogicalParameter("w", shape, "float32")],
        ((0, 1), (2, 3)),
    )
    assert sorted(group.whole for group in plan.groups) == [False, True]
    tensor = torch.arange(48.0).view(shape)
    bindings = [
        Binding(
            plan,
            compile_program(plan, rank),
            TensorSource({"w": shape}, {"w": [(r, tensor[r.slices()].clone()) for r in held[rank]]}),
        )
        if rank in T
        else Binding(
            plan,
            compile_program(plan, rank),
            None,
            TensorSink({"w": [(r, torch.zeros(shape)) for r in merged(direct, columns(shape, [3]))[rank]]}),
        )
        for rank in (0, 1, 2, 3)
    ]
    sources = [region_layout(shape, held)] * 2
    rest = without_m2n(plan, choose_wires(plan, sources, PLACE))
    for binding in bindings:
        (stack,) = stacks_of(plan, {"w": shape}, binding)
        planned, beside = (
            expected_of(program, frozenset()) for program in (binding.program, compile_program(rest, binding.rank))
        )
        for link, nbytes in stack.counts.sent.items():
            assert nbytes + beside.sent[link] == planned.sent[link]
            assert stack.counts.received[link] + beside.received[link] == planned.received[link]


def unconnected(binding: Binding | None = None) -> M2nWire:
    """A wire over stand-ins that knows no rank but its own."""
    wire = M2nWire(queue=HostQueue(), group_maker=Group, library=lambda: None)
    wire._p2p.store = lambda *_: dist.HashStore()
    if binding is not None:
        wire._rank, wire._place = binding.rank, {binding.rank: 0}
    return wire


def test_an_engine_gives_its_views_in_the_thread_and_on_the_stream_that_refit() -> None:
    case = CASES["one hop, engines that repack"]
    _, _, sink, binding = bound_rank(case, case.plan(), 2)
    wire, threads, view = unconnected(binding), set(), sink.view

    def noted(name: str, region: Region) -> torch.Tensor:
        threads.add(threading.current_thread())
        return view(name, region)

    sink.view = noted
    deadline = time.monotonic() + 20
    helped = SimpleNamespace(watched=lambda call, _: wire._helper.call(call, deadline, lambda: None))
    wire._prepare(binding, 1, deadline, helped)
    assert threads == {threading.current_thread()}


def test_what_an_engine_loads_does_not_wait_for_the_next_call() -> None:
    wire, loaded_after = unconnected(), []
    queue = wire._queue

    def call(*_: object) -> None:
        queue.stream().clock["calls"] += 1

    wire._library = SimpleNamespace(reshard=call)
    sink = SimpleNamespace(arrived=lambda *_: loaded_after.append(queue.stream().clock["calls"]))
    stacks = [BoundStack(None, (name,), WireStats(), None, torch.zeros(4)) for name in "abc"]
    watch = SimpleNamespace(news=lambda: None, released=False)
    _Calls(wire, 1, time.monotonic() + 20, watch).make(stacks, sink)
    assert loaded_after == [1, 2, 3]
    assert queue.stream().clock["calls"] == 3
