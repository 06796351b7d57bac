"""Any pair of layouts, any domains, any options: the golden check accepts the plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from refit_transport.layout import (
    Holding,
    LogicalParameter,
    Mesh,
    Replicate,
    Shard,
    StridedShard,
    describe,
    mesh_layout,
)
from refit_transport.planning import PlanOptions, check_plan, plan_refit

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 13])
SMALL_SIZES = st.integers(1, 5)


@st.composite
def placements(draw: st.DrawFn, mesh_dims: int, ndim: int) -> list[object]:
    choices = [st.just(Replicate())]
    if ndim:
        dims = st.integers(-ndim, ndim - 1)
        choices += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
    return [draw(st.one_of(choices)) for _ in range(mesh_dims)]


@st.composite
def meshes(draw: st.DrawFn, ranks: list[int]) -> Mesh:
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 1, 2)]))
    size = 1
    for extent in shape:
        size *= extent
    return Mesh(shape, tuple(draw(st.permutations(ranks))[:size]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[object, ...]:
    world = draw(st.permutations(range(draw(st.integers(12, 14)))))
    order = draw(st.permutations(world))
    domains = draw(st.sampled_from([2, 3, 5]))
    groups = [tuple(order[i::domains]) for i in range(domains)]
    trainers, engines = draw(st.sampled_from([(world, world), (world[:6], world[6:]), (world[:8], world[5:])]))
    parameters, holdings = [], {"source": {}, "sink": {}}
    for number in range(draw(st.integers(1, 3))):
        ndim = draw(st.integers(0, 4))
        shape = tuple(draw(SIZES if ndim < 4 else SMALL_SIZES) for _ in range(ndim))
        name = f"layers.{number}.weight"
        dtypes = draw(st.sampled_from([("float32", "bfloat16"), ("bfloat16", "float32"), ("uint8", "uint8")]))
        parameters.append(LogicalParameter(name, shape, dtypes[0]))
        for side, ranks, dtype in (("source", trainers, dtypes[0]), ("sink", engines, dtypes[1])):
            mesh = draw(meshes(ranks))
            layout = mesh_layout(shape, mesh, draw(placements(len(mesh.shape), ndim)))
            whole = side == "sink" and draw(st.booleans())
            for rank in mesh.ranks:
                held = Holding((name,), shape, dtype, layout.regions_of(rank), whole)
                holdings[side].setdefault(rank, []).append(held)
    options = PlanOptions(
        bucket_bytes=draw(st.sampled_from([1 << 13, 1 << 20])),
        stripe_bytes=draw(st.sampled_from([1, 16, 1 << 16])),
        once_per_domain=draw(st.booleans()),
        relay=draw(st.sampled_from(["auto", "never", "always"])),
        broadcast_root=draw(st.sampled_from(["single", "every"])),
    )
    return describe(holdings["source"]), describe(holdings["sink"]), parameters, groups, options


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_element_arrives_once_whatever_the_layouts(case: tuple[object, ...]) -> None:
    source, sink, parameters, domains, options = case
    plan = plan_refit(source, sink, parameters, domains, options)
    check_plan(plan, source, sink)
