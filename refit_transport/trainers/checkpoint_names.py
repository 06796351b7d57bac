"""Which part of which model tensor holds each tensor of the Hugging Face checkpoint.

transformers renames, splits and fuses tensors between a checkpoint and a model, and can undo that for saving. Here that
reverse conversion runs on tensors without memory, and the views it returns are read back as boxes. So every family that
transformers can save is known, and no table is written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from refit_transport.layout.region import Region


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor and the equally large box of a model tensor that stores it.

    ``dims[d]`` is the model dimension that checkpoint dimension ``d`` runs along, or None where the checkpoint has a
    dimension of size 1 that the model lacks. Model dimensions not named have size 1 in ``source_region``.
    """

    region: Region
    source: str
    source_region: Region
    dims: tuple[int | None, ...]

    def to_checkpoint(self, box: Region) -> Region:
        """``box``, which lies inside ``source_region``, in coordinates of the checkpoint tensor."""
        local = box.relative_to(self.source_region)
        start = [s + (0 if d is None else local.start[d]) for s, d in zip(self.region.start, self.dims, strict=True)]
        stop = [s + (1 if d is None else local.stop[d]) for s, d in zip(self.region.start, self.dims, strict=True)]
        return Region(tuple(start), tuple(stop))

    def held(
        self, boxes: Iterable[tuple[Region, Region]], local: torch.Tensor
    ) -> Iterator[tuple[Region, torch.Tensor]]:
        """What a rank holds of this piece: regions of the checkpoint tensor and the views of ``local`` that store them.
        ``boxes`` pair regions of the model tensor with the regions of ``local`` where they lie."""
        for box, inside in boxes:
            common = box.intersect(self.source_region)
            if common is not None:
                corner = common.relative_to(box)
                at = tuple(slice(o + a, o + b) for o, a, b in zip(inside.start, corner.start, corner.stop, strict=True))
                yield self.to_checkpoint(common), self.orient(local[at])

    def orient(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, indexed as the model tensor, as a view indexed as the checkpoint tensor."""
        kept = [d for d in self.dims if d is not None]
        view = tensor[tuple(slice(None) if d in kept else 0 for d in range(tensor.ndim))]
        view = view.permute([sorted(kept).index(d) for d in kept])
        for position, d in enumerate(self.dims):
            view = view.unsqueeze(position) if d is None else view
        return view


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor that ``save_pretrained`` writes. ``pieces`` are disjoint and cover it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def checkpoint_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[CheckpointTensor]:
    """Checkpoint tensors stored by ``tensors``, the state dict of a transformers model (only names, global shapes and
    dtypes are read; DTensors are fine). Sorted as the conversion yields them. Modules that are not transformers models
    keep their names. Raises ValueError that names the tensor if it is not made of boxes of the model's tensors.
    """
    trace = _Trace()
    named = {name: trace.source(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with trace:
        converted = _reverse_conversion(model)(named)
    return [trace.describe(name, tensor) for name, tensor in converted.items()]


def _reverse_conversion(model: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return lambda named: named
    return lambda named: revert_weight_conversion(model, named)


@dataclass(frozen=True, slots=True)
class _Joined:
    """What torch.cat or torch.stack was called on."""

    parts: tuple[torch.Tensor, ...]
    dim: int


class _Trace(TorchFunctionMode):
    """Keeps views views (``contiguous`` copies nothing here) and remembers what was joined to what."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, tuple[str, torch.Tensor, tuple[int, ...]]] = {}
        self._joined: dict[int, tuple[torch.Tensor, _Joined]] = {}

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without memory that stands for model tensor ``name``. Its strides are padded so that they differ
        even between dimensions of size 1, hence an offset and strides say which box a view selects."""
        padded = [size + 1 for size in shape]
        strides = tuple(accumulate(reversed(padded[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        self._sources[_storage(tensor)] = (name, tensor, strides)
        return tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in (torch.cat, torch.concat, torch.concatenate, torch.stack):
            self._remember(func, result, *args, **(kwargs or {}))
        return result

    def _remember(self, func: Callable, result: torch.Tensor, tensors: Iterable[torch.Tensor], dim: int = 0) -> None:
        dim %= result.ndim
        parts = tuple(t.unsqueeze(dim) if func is torch.stack else t for t in tensors)
        self._joined[_storage(result)] = (result, _Joined(parts, dim))

    def describe(self, name: str, tensor: torch.Tensor) -> CheckpointTensor:
        pieces = self._pieces(name, tensor, (0,) * tensor.ndim)
        return CheckpointTensor(name, tuple(tensor.shape), tensor.dtype, tuple(pieces))

    def _pieces(self, name: str, tensor: torch.Tensor, start: tuple[int, ...]) -> list[Piece]:
        key = _storage(tensor)
        if key in self._sources:
            return [self._piece(name, tensor, start)]
        result, joined = self._joined.get(key, (None, None))
        if joined is None or tensor.shape != result.shape or tensor.stride() != result.stride():
            raise _unresolvable(name, "its conversion copies elements one by one (a permutation or a reshape)")
        pieces, at = [], start[joined.dim]
        for part in joined.parts:
            corner = (*start[: joined.dim], at, *start[joined.dim + 1 :])
            pieces += self._pieces(name, part, corner)
            at += part.shape[joined.dim]
        return pieces

    def _piece(self, name: str, view: torch.Tensor, start: tuple[int, ...]) -> Piece:
        source, base, strides = self._sources[_storage(view)]
        corner, rest = [], view.storage_offset()
        for stride in strides:
            at, rest = divmod(rest, stride)
            corner.append(at)
        dims = tuple(strides.index(s) if s in strides else None for s in view.stride())
        sizes = [1] * base.ndim
        for d, size in zip(dims, view.shape, strict=True):
            if d is None and size != 1:
                raise _unresolvable(name, f"it is not a box of {source} (stride {view.stride()} of {strides})")
            if d is not None:
                sizes[d] = size
        stop = tuple(a + n for a, n in zip(corner, sizes, strict=True))
        if any(b > n for b, n in zip(stop, base.shape, strict=True)) or len({d for d in dims if d is not None}) < sum(
            d is not None for d in dims
        ):
            raise _unresolvable(name, f"it is not a box of {source}")
        region = Region(start, tuple(a + n for a, n in zip(start, view.shape, strict=True)))
        return Piece(region, source, Region(tuple(corner), stop), dims)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _unresolvable(name: str, why: str) -> ValueError:
    return ValueError(
        f"checkpoint tensor {name}: cannot be described by regions of the model's tensors: {why}. "
        "Give the trainer a source of its own (refit_transport.trainers.base.WeightSource) or use gather_broadcast "
        "with a state dict that already has checkpoint names."
    )
