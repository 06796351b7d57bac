"""The oracle tells every wrong content from the right one."""

import pytest
import torch

from refit_transport.bench import oracle
from refit_transport.layout.region import Region

SHAPE = (24, 10, 6)
WHOLE = Region.whole(SHAPE)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8]


def contents(region: Region = WHOLE, name: str = "w", version: int = 1, dtype=torch.bfloat16) -> torch.Tensor:
    tensor = torch.zeros(region.shape, dtype=dtype)
    oracle.fill(tensor, name, region, SHAPE, version)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("region", [WHOLE, Region((6, 0, 0), (12, 10, 6)), Region((3, 2, 1), (7, 9, 4))], ids=str)
def test_a_shard_holds_the_same_values_as_its_place_in_the_whole(dtype, region):
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    cut = contents(dtype=dtype)[region.slices()].contiguous()
    assert torch.equal(contents(region, dtype=dtype).view(bits), cut.view(bits))
    assert oracle.matches(cut, "w", region, SHAPE, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: contents(version=2),
        lambda: contents(name="v"),
        lambda: contents().roll(1, 0),
        lambda: contents().roll(1, 1),
        lambda: contents().roll(1, 2),
        lambda: contents().flip(0),
        lambda: torch.zeros(SHAPE, dtype=torch.bfloat16),
    ],
    ids=["older version", "other tensor", "rows moved", "middle moved", "columns moved", "reversed", "unwritten"],
)
def test_wrong_contents_do_not_match(wrong):
    assert not oracle.matches(wrong(), "w", WHOLE, SHAPE, 1)


def test_a_single_wrong_bit_does_not_match():
    tensor = contents()
    tensor.view(torch.int16)[23, 9, 5] ^= 1
    assert not oracle.matches(tensor, "w", WHOLE, SHAPE, 1)


def test_two_equal_shards_swapped_do_not_match():
    upper, lower = Region((0, 0, 0), (12, 10, 6)), Region((12, 0, 0), (24, 10, 6))
    assert not oracle.matches(contents(lower), "w", upper, SHAPE, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_floats_are_finite_and_survive_bfloat16(dtype):
    tensor = contents(dtype=dtype)
    assert tensor.isfinite().all()
    if dtype != torch.float16:
        assert torch.equal(tensor.to(torch.bfloat16), contents(dtype=torch.bfloat16))


def test_a_scalar_is_filled_and_checked():
    tensor = torch.zeros((), dtype=torch.float32)
    oracle.fill(tensor, "s", Region((), ()), (), 3)
    assert oracle.matches(tensor, "s", Region((), ()), (), 3)
    assert not oracle.matches(tensor, "s", Region((), ()), (), 4)
