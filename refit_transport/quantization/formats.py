"""The block-scaled FP8 formats: block shapes, scale tensors, and where a tensor may be cut. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import LayoutError, Region

VALUES = "float8_e4m3fn"
LARGEST = 448.0
"""Largest finite value of ``VALUES``."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Values in FP8, one scale per block. A block at the end of a tensor may be smaller, unless ``exact``."""

    name: str
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    suffix: str
    """``weight`` + suffix is the checkpoint's name of the scales."""
    scale_dtype: str
    exact: bool
    """The number of columns has to be a multiple of the block's."""

    def scales_of(self, parameter: LogicalParameter) -> LogicalParameter:
        """The scales of a weight [rows, columns]: one per block."""
        whole = self.scale_region(parameter.name, parameter.shape, Region.whole(parameter.shape))
        return LogicalParameter(parameter.name + self.suffix, whole.shape, self.scale_dtype)

    def scale_region(self, name: str, shape: tuple[int, ...], region: Region) -> Region:
        """The scales that belong to ``region`` of a weight. Raises LayoutError, naming the parameter, for a region that
        cuts a block."""
        if self.exact and shape[1] % self.block[1]:
            raise LayoutError(f"{name}: {self.name} needs columns in multiples of {self.block[1]}, it has {shape[1]}")
        for dim, size in enumerate(self.block):
            for cut in (region.start[dim], region.stop[dim]):
                if cut % size and cut != shape[dim]:
                    raise LayoutError(
                        f"{name}: {region} is cut at {cut} of {shape[dim]} in dimension {dim}, inside a block of "
                        f"{self.block[0]} x {self.block[1]} of {self.name}; use fewer ranks in that dimension, or "
                        "quantize: none"
                    )
        pairs = list(zip(region.start, region.stop, self.block, strict=True))
        return Region(tuple(a // size for a, _, size in pairs), tuple(-(-b // size) for _, b, size in pairs))


FP8_BLOCKWISE = BlockFormat("fp8_blockwise", (128, 128), "_scale_inv", "float32", exact=False)
"""As in DeepSeek-V3's checkpoint: weight = value * scale, with float32 scales."""
MXFP8 = BlockFormat("mxfp8", (1, 32), "_scale", "uint8", exact=True)
"""OCP MX: weight = value * 2^(scale - 127); the e8m0 scales are stored as uint8, as ModelOpt writes and vLLM keeps
them."""

FORMATS = {format.name: format for format in (FP8_BLOCKWISE, MXFP8)}
CHOICES = ("none", *FORMATS)


def format_named(name: str | None) -> BlockFormat | None:
    """The format that the option ``quantize`` names. Raises ValueError for an unknown one."""
    if (name or "none") not in CHOICES:
        raise ValueError(f"quantize is {name!r}; allowed: {', '.join(CHOICES)}")
    return FORMATS.get(name or "none")


def is_projection(parameter: LogicalParameter) -> bool:
    """Whether block-quantised checkpoints hold a tensor in FP8: matrices of linear layers, but not embeddings, output
    head, norms and routers."""
    return (
        len(parameter.shape) == 2
        and parameter.dtype in ("float32", "bfloat16", "float16")
        and parameter.name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
    )


def check_cuts(form: BlockFormat, parameters: Iterable[LogicalParameter], held: Mapping[str, Sequence[Region]]) -> None:
    """Raises LayoutError when an inference rank holds a part of a quantised weight that cuts a block. A weight is
    quantised when its scales are among ``parameters``."""
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    for name, regions in held.items():
        if name + form.suffix in shapes:
            for region in regions:
                form.scale_region(name, shapes[name], region)
