"""FP8 on the way out: right numbers, the same for every sharding, in one version with their scales, or refused."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.describe import describe, group_holdings
from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import LayoutError, Region
from refit_transport.planning import plan_refit
from refit_transport.quantization.blocks import dequantize, quantize
from refit_transport.quantization.formats import FORMATS, FP8_BLOCKWISE, MXFP8, BlockFormat, is_projection
from refit_transport.quantization.source import QuantizedSource
from refit_transport.session.errors import RefitError
from refit_transport.session.member import RefitMember
from refit_transport.trainers.tensors import TensorSource

sys.path.insert(0, str(Path(__file__).parent.parent / "session"))
from ranks import World, run_ranks

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def weights(shape: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values whose rows and columns differ in scale by up to 2^40, with a block of zeros and one huge value."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(-20, 20, shape[0]).exp2()[:, None]
    tensor = torch.randn(shape, generator=generator) * spread
    tensor[:128, :64] = 0
    tensor[-1, -1] = 3e30
    return tensor.to(dtype)


def whole(tensor: torch.Tensor, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    parameter = LogicalParameter("w", tuple(tensor.shape), "bfloat16")
    scales = torch.empty(form.scales_of(parameter).shape, dtype=getattr(torch, form.scale_dtype))
    assert quantize(tensor, form, values, scales)
    return values, scales


def reference(tensor: torch.Tensor, form: BlockFormat) -> tuple[np.ndarray, np.ndarray]:
    """Block by block in plain loops, rounding to the nearest of all 253 finite FP8 values, ties to even."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    finite = np.flatnonzero(np.isfinite(table) & ~((table == 0) & (np.arange(256) == 128)))
    finite = finite[np.argsort(table[finite], kind="stable")]
    grid = table[finite]
    height, width = form.block
    array = tensor.float().numpy()
    values = np.zeros(array.shape, np.uint8)
    scales = np.zeros((-(-array.shape[0] // height), -(-array.shape[1] // width)), form.scale_dtype)
    for i, j in np.ndindex(scales.shape):
        box = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        largest = np.abs(array[box]).max() / np.float32(448)
        factor = np.float32(largest or 1)
        if form is FP8_BLOCKWISE:
            scales[i, j] = factor
        elif largest:
            exponent = next(e for e in range(-127, 128) if 2.0**e >= float(largest))
            scales[i, j], factor = exponent + 127, np.float32(2.0**exponent)
        scaled = np.clip((array[box] / factor).astype(np.float64), -448, 448)
        above = np.clip(np.searchsorted(grid, scaled), 1, len(grid) - 1)
        low, high = grid[above - 1], grid[above]
        to_low, to_high = scaled - low, high - scaled
        even_low = finite[above - 1] % 2 == 0
        pick = np.where((to_low < to_high) | ((to_low == to_high) & even_low), above - 1, above)
        codes = finite[pick].astype(np.uint8)
        values[box] = np.where((codes == 0) & np.signbit(array[box]), 128, codes)
    return values, scales


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_scales_are_those_of_a_plain_loop_over_blocks(form: BlockFormat, dtype: torch.dtype) -> None:
    tensor = weights((200, 160) if form is MXFP8 else (200, 150), dtype=dtype)
    values, scales = whole(tensor, form)
    expected_values, expected_scales = reference(tensor, form)
    assert np.array_equal(scales.numpy(), expected_scales)
    assert np.array_equal(values.view(torch.uint8).numpy(), expected_values)


@BOTH
def test_what_is_read_back_is_within_half_a_step_of_fp8(form: BlockFormat) -> None:
    tensor = weights((384, 256), dtype=torch.float32)
    values, scales = whole(tensor, form)
    back = dequantize(values, scales, form)
    factor = dequantize(torch.ones_like(values), scales, form)
    allowed = torch.maximum(tensor.abs() * 2.0**-4, factor * 2.0**-10) * (1 + 1e-5)
    assert back.isfinite().all()
    assert ((back - tensor).abs() <= allowed).all()
    assert (back[:128, :64] == 0).all()


def test_a_block_of_the_smallest_numbers_rounds_to_zero_without_a_nan() -> None:
    tiny = torch.full((128, 128), torch.finfo(torch.float32).smallest_normal)
    for form in FORMATS.values():
        back = dequantize(*whole(tiny, form), form)
        assert back.isfinite().all() and (back <= tiny * 1.1).all()


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise(size * part // parts for part in range(parts + 1)))


def source_of(full: dict[str, torch.Tensor], regions: dict[str, list[Region]]) -> TensorSource:
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    return TensorSource(shapes, {n: [(r, full[n][r.slices()].clone()) for r in held] for n, held in regions.items()})


@BOTH
@pytest.mark.parametrize("rows, columns", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (1, 6)])
@pytest.mark.parametrize("strided", [False, True])
def test_every_sharding_on_blocks_gives_the_bits_of_the_full_tensor_exactly_once(form, rows, columns, strided) -> None:
    full = weights((512, 768))
    if strided:
        full = full.t().contiguous().t()
    values, scales = whole(full, form)
    covered = torch.zeros(full.shape), torch.zeros(scales.shape)
    got = torch.zeros_like(values), torch.zeros_like(scales)
    for a, b in cuts(512, rows):
        for c, d in cuts(768, columns):
            source = QuantizedSource(source_of({UP: full}, {UP: [Region((a, c), (b, d))]}), form)
            source.refresh()
            assert [p.dtype for p in source.parameters()] == ["float8_e4m3fn", form.scale_dtype]
            for index, name in enumerate((UP, UP + form.suffix)):
                (region,) = source.holdings()[name]
                got[index][region.slices()] = source.view(name, region)
                covered[index][region.slices()] += 1
    assert all((count == 1).all() for count in covered)
    assert torch.equal(got[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got[1], scales)


def test_a_short_block_at_the_end_of_a_tensor_is_allowed_there_only() -> None:
    full = weights((300, 200))
    source = QuantizedSource(source_of({UP: full}, {UP: [Region((256, 128), (300, 200))]}), FP8_BLOCKWISE)
    source.refresh()
    assert source.holdings()[UP + "_scale_inv"] == (Region((2, 1), (3, 2)),)
    values, scales = whole(full, FP8_BLOCKWISE)
    shard = source.view(UP, Region((256, 128), (300, 200)))
    assert torch.equal(shard.view(torch.uint8), values[256:, 128:].view(torch.uint8))
    assert source.view(UP + "_scale_inv", Region((2, 1), (3, 2))) == scales[2, 1]


@pytest.mark.parametrize(
    "form, shape, region, text",
    [
        (FP8_BLOCKWISE, (2048, 512), Region((64, 0), (128, 512)), "cut at 64 of 2048 in dimension 0"),
        (FP8_BLOCKWISE, (2048, 512), Region((0, 0), (128, 200)), "cut at 200 of 512 in dimension 1"),
        (MXFP8, (64, 64), Region((0, 16), (64, 64)), "cut at 16 of 64 in dimension 1"),
        (MXFP8, (64, 80), Region((0, 0), (64, 80)), "columns in multiples of 32, it has 80"),
    ],
)
def test_a_shard_that_cuts_a_block_is_refused_with_the_parameter_named(form, shape, region, text) -> None:
    source = QuantizedSource(source_of({DOWN: torch.zeros(shape)}, {DOWN: [region]}), form)
    with pytest.raises(LayoutError, match=f"{DOWN}: .*{text}"):
        source.holdings()


def test_only_matrices_of_linear_layers_are_quantised() -> None:
    full = {
        "model.embed_tokens.weight": (256, 128), "lm_head.weight": (256, 128), NORM: (128,),
        "model.layers.0.mlp.gate.weight": (8, 128), "model.layers.0.mlp.gate.e_score_correction_bias": (8,),
        "model.layers.0.self_attn.q_proj.bias": (128,), "model.layers.0.self_attn.q_proj.weight": (128, 128),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (128, 128),
        "model.layers.0.mlp.experts.3.down_proj.weight": (128, 128),
        "model.layers.0.block_sparse_moe.experts.0.w2.weight": (128, 128),
    }  # fmt: skip
    chosen = [n for n, shape in full.items() if is_projection(LogicalParameter(n, shape, "bfloat16"))]
    assert chosen == list(full)[-4:]
    assert not is_projection(LogicalParameter(UP, (128, 128), "float8_e4m3fn"))


@BOTH
def test_refits_quantise_anew_into_the_same_memory(form: BlockFormat) -> None:
    held = torch.zeros(256, 256)
    region = Region.whole((256, 256))
    source = QuantizedSource(TensorSource({UP: (256, 256)}, {UP: [(region, held)]}), form)
    scales_name = UP + form.suffix
    assert source.refresh(), "the first refresh makes the memory"
    (scales_region,) = source.holdings()[scales_name]
    pointers = [source.view(UP, region).data_ptr(), source.view(scales_name, scales_region).data_ptr()]
    for seed in range(3):
        held.copy_(weights((256, 256), seed, torch.float32))
        assert not source.refresh()
        values, scales = whole(held, form)
        assert torch.equal(source.view(UP, region).view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(source.view(scales_name, scales_region), scales)
        assert [source.view(UP, region).data_ptr(), source.view(scales_name, scales_region).data_ptr()] == pointers


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(bad: float) -> None:
    full = {UP: torch.zeros(128, 128), DOWN: torch.zeros(128, 128)}
    full[DOWN][5, 7] = bad
    source = QuantizedSource(source_of(full, {n: [Region.whole((128, 128))] for n in full}), FP8_BLOCKWISE)
    with pytest.raises(ValueError, match=f"fp8_blockwise: not finite: {DOWN} \\(1 in all\\)"):
        source.refresh()


SHAPES = {UP: (512, 256), DOWN: (256, 512), NORM: (256,)}


def contents(version: int) -> dict[str, torch.Tensor]:
    return {
        UP: weights(SHAPES[UP], version), DOWN: weights(SHAPES[DOWN], version + 50),
        NORM: torch.full((256,), float(version)),
    }  # fmt: skip


def join(world: World, rank: int, address: str, engine_columns: int = 2):
    """Trainers hold rows; engines hold columns of ``down`` and rows of ``up``, as tensor parallelism does."""
    form = FORMATS[world.options["quantize"]]
    if rank < world.trainers:
        shards = {
            UP: [Region((256 * rank, 0), (256 * rank + 256, 256))],
            DOWN: [Region((128 * rank, 0), (128 * rank + 128, 512))],
            NORM: [Region((128 * rank,), (128 * rank + 128,))],
        }
        source = source_of(contents(0), shards)
        return source, RefitMember.join(address, rank=rank, role="trainer", source=source)
    part, step = rank - world.trainers, 512 // engine_columns
    cut = {UP: Region((step * part, 0), (step * part + step, 256)), DOWN: Region((0, step * part), (256, step * part + step))}  # fmt: skip # noqa: E501
    held = {NORM: [(Region.whole((256,)), torch.zeros(256))]}
    for name, region in cut.items():
        held[name] = [(region, torch.zeros(region.shape, dtype=torch.float8_e4m3fn))]
        near = Region(
            tuple(a // b for a, b in zip(region.start, form.block)),
            tuple(-(-a // b) for a, b in zip(region.stop, form.block)),
        )
        held[name + form.suffix] = [(near, torch.zeros(near.shape, dtype=getattr(torch, form.scale_dtype)))]
    return held, RefitMember.join(address, rank=rank, role="engine", sink=TensorSink(held))


@BOTH
@pytest.mark.parametrize("scope", ["ffn", "all"])
def test_engines_hold_values_and_scales_of_the_same_version_after_each_refit(form: BlockFormat, scope: str) -> None:
    def body(world: World, rank: int, address: str):
        held, member = join(world, rank, address)
        wrong = []
        for version in (1, 2, 3):
            full = contents(version)
            if rank < world.trainers:
                for name, parts in held._holdings.items():
                    for region, tensor in parts:
                        tensor.copy_(full[name][region.slices()])
            member.refit(version)
            if rank >= world.trainers:
                expected = {NORM: full[NORM]}
                for name in (UP, DOWN):
                    expected[name], expected[name + form.suffix] = whole(full[name], form)
                wrong += [
                    (version, name)
                    for name, ((region, tensor),) in held.items()
                    if not torch.equal(
                        tensor.view(torch.uint8), expected[name][region.slices()].contiguous().view(torch.uint8)
                    )
                ]
        member.leave()
        return wrong

    options = {"transport": "nccl_reshard", "scope": scope, "quantize": form.name, "verify": "checksum"}
    assert run_ranks(World(2, 2, options), body) == [[]] * 4


def test_an_engine_whose_ranks_cut_a_block_is_refused_before_a_byte_moves_on_every_rank() -> None:
    """512 columns over eight ranks are 64 each: what tensor parallelism of 32 does to DeepSeek-V3's experts."""
    options = {"transport": "nccl_reshard", "scope": "all", "quantize": "fp8_blockwise"}
    results = run_ranks(World(2, 8, options), lambda world, rank, address: join(world, rank, address, 8)[1])
    assert all(isinstance(r, RefitError) for r in results)
    assert all(re.search(r"engine rank \d+ .*_proj\.weight: .* is cut at \d+ of 512", str(r)) for r in results), results


def test_the_planner_sees_scales_as_parameters_that_are_needed_exactly_once() -> None:
    source = QuantizedSource(source_of({UP: weights((256, 256))}, {UP: [Region.whole((256, 256))]}), FP8_BLOCKWISE)
    held = group_holdings(source.parameters(), source.holdings())
    plan = plan_refit(describe({0: held}), describe({1: held}), source.parameters(), ((0,), (1,)))
    moved = {plan.parameters[m].name: g.wire_dtype for g in plan.groups for m in g.members}
    assert moved == {UP: "float8_e4m3fn", UP + "_scale_inv": "float32"}


@pytest.mark.engine
def test_vllms_own_quantisers_agree() -> None:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    tensor = torch.randn((256, 512), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    values, scales = whole(tensor, MXFP8)
    theirs, their_scales = _mxfp8_e4m3_quantize_torch(tensor)
    assert torch.equal(scales, their_scales)
    assert torch.equal(values.view(torch.uint8), theirs.view(torch.uint8))
