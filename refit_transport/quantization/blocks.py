"""Quantises matrices block by block, strip by strip, into given memory."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .formats import LARGEST, BlockFormat

_STRIP = 4 << 20
"""Elements that are worked on at a time, in float32."""


@torch.no_grad()
def quantize(weight: torch.Tensor, form: BlockFormat, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Writes ``weight`` [rows, columns] (floating, any strides), which begins at a block, to ``values`` (float8_e4m3fn,
    same shape) and ``scales`` [row blocks, column blocks]. Rounds to nearest even; nothing overflows. The result
    depends on the block alone, not on how the matrix is sharded. Returns a bool scalar on the weight's device: whether
    all of ``weight`` was finite."""
    height, width = form.block
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    strip = max(1, _STRIP // max(1, height * weight.shape[1])) * height
    for start in range(0, weight.shape[0], strip):
        part = weight[start : start + strip].float()
        rows, columns = part.shape
        part = pad(part, (0, -columns % width, 0, -rows % height))
        blocks = part.view(part.shape[0] // height, height, part.shape[1] // width, width)
        largest = blocks.abs().amax((1, 3))
        finite &= largest.isfinite().all()
        stored, factor = _scales(largest, form)
        scaled = blocks.div(factor[:, None, :, None]).clamp_(-LARGEST, LARGEST).view_as(part)
        values[start : start + rows].copy_(scaled[:rows, :columns])
        scales[start // height : start // height + len(stored)].copy_(stored)
    return finite


def dequantize(values: torch.Tensor, scales: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The float32 matrix that ``values`` and ``scales`` stand for."""
    height, width = form.block
    factor = scales if form.scale_dtype == "float32" else torch.exp2(scales.float() - 127.0)
    spread = factor.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return values.float() * spread[: values.shape[0], : values.shape[1]]


def _scales(largest: torch.Tensor, form: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as they are stored, and as float32 factors, for blocks whose largest magnitudes are ``largest``."""
    ratio = largest / LARGEST
    if form.scale_dtype == "float32":
        # A block of zeros, or of values too small for a normal scale, keeps the factor 1: it rounds to zeros.
        factor = torch.where(ratio >= torch.finfo(torch.float32).tiny, ratio, 1.0)
        return factor, factor
    mantissa, exponent = torch.frexp(ratio)  # in [0.5, 1): 0.5 is an exact power of two
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    stored = torch.where(ratio > 0, exponent + 127, 0).to(torch.uint8)
    return stored, torch.where(ratio > 0, torch.ldexp(torch.ones_like(ratio), exponent), 1.0)
