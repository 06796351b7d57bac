"""What ``wire_dtype`` does to the numbers and to the bytes that cross, by whole refits in memory."""

from __future__ import annotations

import pytest
import torch

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.layout import ITEMSIZE
from refit_transport.layout.region import Region
from refit_transport.planning import PlanError, compile_program
from refit_transport.runtime.binding import Binding
from refit_transport.trainers.tensors import TensorSource
from tests.matrix.in_memory_wire import InMemoryWire
from tests.matrix.refits import plan_of

SHAPE = (16, 64)
PATHS = {"all": {"transport": "nccl_reshard", "scope": "all"}, "broadcast": {"transport": "gather_broadcast"}}


def hard_numbers() -> torch.Tensor:
    """float32 [16, 64]: ties between two bfloat16, their neighbours, subnormals, the largest, infinities, zeros."""
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-8 - 2.0**-20, -(1 + 2.0**-8)]
    edges = [0.0, -0.0, float("inf"), -float("inf"), torch.finfo(torch.float32).max, 2.0**-149, 2.0**-133, 2.0**-126]
    special = torch.tensor(ties + edges)
    return torch.cat([special, torch.randn(16 * 64 - len(special), generator=torch.Generator().manual_seed(1))]).view(
        SHAPE
    )


def refit(held: torch.Tensor, needed: torch.dtype, wire_dtype: str, path: str = "all") -> tuple[torch.Tensor, int]:
    """Rows of two trainers to columns of two engine ranks; the tensor they then hold, and the bytes that crossed."""
    rows = [Region((0, 0), (5, 64)), Region((5, 0), SHAPE)]
    columns = [Region((0, 0), (16, 40)), Region((0, 40), SHAPE)]
    sources = [TensorSource({"w": SHAPE}, {"w": [(r, held[r.slices()].clone())]}) for r in rows]
    memory = [torch.zeros(r.shape, dtype=needed) for r in columns]
    sinks = {rank: TensorSink({"w": [(columns[rank - 2], memory[rank - 2])]}) for rank in (2, 3)}
    plan = plan_of(sources, sinks, {**PATHS[path], "wire_dtype": wire_dtype}, ((0, 1), (2,), (3,)))
    bindings = {
        rank: Binding(plan, compile_program(plan, rank), sources[rank] if rank < 2 else None, sinks.get(rank))
        for rank in plan.world
    }
    stats = InMemoryWire(bindings).run(1)
    return torch.cat(memory, 1), sum(s.sent["network"] for s in stats.values())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("held", "needed", "option", "travels"),
    [
        ("float32", "bfloat16", "auto", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "float32", "float32"),
        ("bfloat16", "float32", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32", "float32"),
        ("float32", "float32", "auto", "float32"),
        ("float32", "float16", "auto", "float16"),
        ("float16", "bfloat16", "auto", "bfloat16"),
        ("float64", "bfloat16", "auto", "bfloat16"),
        ("bfloat16", "bfloat16", "auto", "bfloat16"),
        ("bfloat16", "bfloat16", "float32", "float32"),
    ],
)
def test_the_engine_holds_torchs_own_cast_of_the_trainers_numbers(
    held: str, needed: str, option: str, travels: str, path: str
) -> None:
    masters = hard_numbers().to(getattr(torch, held))
    arrived, crossed = refit(masters, getattr(torch, needed), option, path)
    assert same_bits(arrived, masters.to(getattr(torch, needed)))
    copies = 2 if path == "broadcast" else 1  # every engine rank is in a domain of its own
    assert crossed == masters.numel() * ITEMSIZE[travels] * copies


def test_not_a_number_stays_one() -> None:
    masters = hard_numbers()
    masters[3] = float("nan")
    assert refit(masters, torch.bfloat16, "auto")[0][3].isnan().all()


@pytest.mark.parametrize("option", ["bfloat16", "float16"])
def test_a_forced_dtype_never_narrows_what_both_sides_hold_wider(option: str) -> None:
    """A router bias in float32 would send tokens to other experts."""
    masters = hard_numbers()
    arrived, crossed = refit(masters, torch.float32, option)
    assert same_bits(arrived, masters)
    assert crossed == masters.numel() * 4


@pytest.mark.parametrize("option", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2"])
def test_integers_booleans_and_float8_travel_bit_for_bit_whatever_the_option(dtype: str, option: str) -> None:
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (16, 64 * ITEMSIZE[dtype]), dtype=torch.uint8)
    held = bits.view(getattr(torch, dtype))
    arrived, crossed = refit(held, held.dtype, option)
    assert same_bits(arrived, held)
    assert crossed == held.numel() * ITEMSIZE[dtype]


@pytest.mark.parametrize("option", ["auto", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("held", "needed"),
    [("int32", "int64"), ("bool", "bfloat16"), ("float32", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")],
)
def test_a_cast_of_anything_but_floats_is_refused_with_name_and_dtypes(held: str, needed: str, option: str) -> None:
    with pytest.raises(
        PlanError, match=f"w: trainers hold {held}, inference ranks need {needed}; only .* are converted"
    ):
        refit(torch.zeros(SHAPE, dtype=getattr(torch, held)), getattr(torch, needed), option)
