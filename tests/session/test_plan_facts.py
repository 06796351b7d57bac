"""What a session says of its plan: what nobody needs, what nobody sends, and which dtypes travel."""

import pytest
import torch
from ranks import World, run_ranks

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.region import Region
from refit_transport.session.errors import RefitError
from refit_transport.session.member import RefitMember
from refit_transport.trainers.tensors import TensorSource

UP = "model.layers.0.mlp.up_proj.weight"
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
MTP = ("model.layers.61.eh_proj.weight", "model.layers.61.embed_tokens.weight", "model.layers.61.mlp.up_proj.weight")
SHAPES = {UP: (8, 6), BIAS: (8,), **dict.fromkeys(MTP, (4, 6))}
DTYPES = {UP: (torch.float32, torch.bfloat16), BIAS: (torch.float32, torch.float32)}


def tensor(name: str) -> torch.Tensor:
    """float32 numbers that bfloat16 cannot hold."""
    count = torch.Size(SHAPES[name]).numel()
    return (1 + torch.arange(count) * 2.0**-12 + sorted(SHAPES).index(name)).view(SHAPES[name])


def rows(name: str, rank: int, ranks: int) -> Region:
    size = SHAPES[name][0] // ranks
    return Region((size * rank, *[0] * (len(SHAPES[name]) - 1)), (size * rank + size, *SHAPES[name][1:]))


def joined(names: tuple[str, ...], needed: tuple[str, ...]):
    """The body of a rank: trainers hold ``names``, engines need ``needed``; returns its member and its tensors."""

    def body(world: World, rank: int, address: str):
        if rank < world.trainers:
            held = {n: [(r := rows(n, rank, world.trainers), tensor(n)[r.slices()].clone())] for n in names}
            return held, RefitMember.join(address, rank=rank, role="trainer", source=TensorSource(SHAPES, held))
        held = {n: [(Region.whole(SHAPES[n]), torch.zeros(SHAPES[n], dtype=DTYPES[n][1]))] for n in needed}
        return held, RefitMember.join(address, rank=rank, role="engine", sink=TensorSink(held))

    return body


@pytest.mark.parametrize("options", [{"transport": "nccl_reshard", "scope": "all"}, {"transport": None}])
def test_draft_layers_that_no_engine_loads_are_named_once_in_the_plan_line(options):
    join = joined(tuple(SHAPES), (UP, BIAS))

    def body(world, rank, address):
        _, member = join(world, rank, address)
        report = member.refit(1)
        summary = member.plan_summary()
        return summary.unused, summary.line(), report.bytes_reshard + report.bytes_broadcast

    for unused, line, moved in run_ranks(World(2, 2, options), body):
        assert unused == MTP
        assert "not needed by any engine: " + ", ".join(MTP) in line
        assert all(line.count(name) == 1 for name in MTP)
        assert moved == 2 * (48 * 2 + 8 * 4), "nothing of them travels"


@pytest.mark.parametrize("options", [{"transport": "nccl_reshard", "scope": "all"}, {"transport": None}])
def test_a_draft_that_the_engine_has_and_no_trainer_sends_is_refused_by_name(options):
    DTYPES.update(dict.fromkeys(MTP, (torch.float32, torch.bfloat16)))
    results = run_ranks(World(2, 2, options), joined((UP, BIAS), (UP, BIAS, MTP[2])))
    assert all(isinstance(r, RefitError) and MTP[2] in str(r) and "engine rank" in str(r) for r in results)


@pytest.mark.parametrize("wire_dtype, kept", [("auto", {}), ("bfloat16", {BIAS: "float32"}), ("float32", {})])
@pytest.mark.parametrize("scope", ["ffn", "all"])
def test_a_float32_buffer_among_bfloat16_weights_keeps_its_bits(wire_dtype, kept, scope):
    join = joined((UP, BIAS), (UP, BIAS))

    def body(world, rank, address):
        held, member = join(world, rank, address)
        member.refit(1)
        summary = member.plan_summary()
        right = all(torch.equal(t, tensor(n).to(DTYPES[n][1])) for n, ((_, t),) in held.items()) or rank < 2
        sent = sum(member._expected.sent.values())
        return right, summary.kept_wide, summary.line(), sent

    options = {"transport": "nccl_reshard", "scope": scope, "wire_dtype": wire_dtype}
    results = run_ranks(World(2, 2, options), body)
    assert all(right for right, *_ in results)
    assert all(found == kept for _, found, *_ in results)
    for _, _, line, _ in results:
        assert (f"wider on both sides than wire_dtype: {BIAS} (float32)" in line) == bool(kept)
    width = 4 if wire_dtype == "float32" else 2
    assert sum(sent for *_, sent in results) == 2 * (48 * width + 8 * 4)
