"""Learns where each checkpoint tensor lands in a vLLM model by running the model's own ``load_weights`` without data.

The checkpoint and the model are both put on the meta device. A dispatch mode sees every ``copy_``; since views of meta
tensors keep their storage, offset, sizes and strides, both ends of a copy are exact. What a loader computes instead of
copying is reported with the operation that hid it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from refit_transport.layout.layout import LogicalParameter

from .model_format import in_model_format
from .strided import Strided

_COPY = torch.ops.aten.copy_.default
_CLONE = torch.ops.aten.clone.default
_ZERO = torch.ops.aten.zero_.default
_FILL = torch.ops.aten.fill_.Scalar


@dataclass(frozen=True, slots=True)
class Copy:
    """A loader copied ``source`` of checkpoint tensor ``name`` onto ``target`` of the model's tensor ``tensor``."""

    name: str
    source: Strided
    tensor: str
    target: Strided


@dataclass(frozen=True, slots=True)
class Zero:
    """A loader filled ``target`` of ``tensor`` with zeros: padding, or a bias that only one rank adds."""

    tensor: str
    target: Strided


@dataclass(frozen=True, slots=True)
class Computed:
    """A loader wrote something that is not a plain copy. ``names`` are the checkpoint tensors it may depend on (none
    when unknown) and ``tensor`` the model's tensor (None when it is none of them)."""

    names: tuple[str, ...]
    tensor: str | None
    reason: str


@dataclass(slots=True)
class Recording:
    """Everything that one run of ``load_weights`` wrote."""

    copies: list[Copy] = field(default_factory=list)
    zeros: list[Zero] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    formats: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """Shape and dtype in model format of every tensor of the model, by path."""


class _Recorder(TorchDispatchMode):
    def __init__(self, sources: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.recording = Recording()
        self._sources = {_storage(t): name for name, t in sources.items()}
        self._tensors = {_storage(t): path for path, t in tensors.items()}
        self._derived: dict[int, tuple[frozenset[str], str]] = {}
        """Results of operations on checkpoint tensors: what they depend on, and the last operation."""
        self._changed: dict[str, str] = {}
        """Checkpoint tensors that a loader overwrote, with the operation."""
        self._kept: list[torch.Tensor] = []
        """Keeps the storages alive, so that no address is used twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _COPY and (_storage(args[0]) in self._tensors or self._depends(args[1])):
            return self._copy(args[0], args[1])
        if func is _CLONE and _storage(args[0]) in self._sources:
            return args[0]  # .contiguous() moves elements but names the same ones: the strides keep the order
        for tensor in _written(func, args, kwargs):
            if _storage(tensor) in self._tensors:
                self._write(func, tensor, args)
                return tensor
            if _storage(tensor) in self._sources:
                self._changed[self._sources[_storage(tensor)]] = str(func)
        result = func(*args, **kwargs)
        self._trace(func, args, kwargs, result)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        path, name = self._tensors.get(_storage(target)), self._sources.get(_storage(source))
        depends, operation = self._depends(source) or (frozenset(), "an unknown source")
        if path is None:
            if not target.is_meta:
                self.recording.computed.append(Computed(tuple(sorted(depends)), None, "the loader keeps it elsewhere"))
            self._derived[_storage(target)] = (depends, "aten.copy_")
            self._kept.append(target)
        elif name is not None and self._changed.get(name, "").startswith("aten.zero_"):
            self.recording.zeros.append(Zero(path, Strided.of(target)))
        elif name is None or name in self._changed or source.numel() != target.numel():
            reason = self._changed.get(name or "", operation if name is None else "a repeated source")
            self.recording.computed.append(
                Computed(tuple(sorted(depends)), path, f"the loader computes it with {reason}")
            )
        else:
            # A copy may add dimensions of size one; dropping them all makes both ends comparable.
            ends = (Strided.of(t.squeeze()) for t in (source, target))
            self.recording.copies.append(Copy(name, next(ends), path, next(ends)))
        return target

    def _write(self, func: Any, tensor: torch.Tensor, args: Any) -> None:
        path = self._tensors[_storage(tensor)]
        if func is _ZERO or (func is _FILL and args[1] == 0):
            if tensor.numel():
                self.recording.zeros.append(Zero(path, Strided.of(tensor)))
        else:
            names = sorted(name for a in args if isinstance(a, torch.Tensor) for name in (self._depends(a) or ((),))[0])
            self.recording.computed.append(Computed(tuple(names), path, f"the loader computes it with {func}"))

    def _depends(self, tensor: torch.Tensor) -> tuple[frozenset[str], str] | None:
        key = _storage(tensor)
        if key in self._sources:
            return frozenset((self._sources[key],)), "a plain view"
        return self._derived.get(key)

    def _trace(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note on what the results of an operation depend, unless they are views of its inputs."""
        inputs = list(_tensors_in((args, kwargs)))
        known = {_storage(tensor) for tensor in inputs}
        if not any(key in self._sources or key in self._tensors or key in self._derived for key in known):
            return
        depends = frozenset().union(*(found[0] for tensor in inputs if (found := self._depends(tensor)) is not None))
        for tensor in _tensors_in(result):
            if _storage(tensor) not in known:
                self._derived[_storage(tensor)] = (depends, str(func))
                self._kept.append(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Arguments that ``func`` writes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


@torch.no_grad()
def record(
    model: nn.Module,
    parameters: Sequence[LogicalParameter],
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = None,
) -> Recording:
    """Run ``load``, which is ``model.load_weights`` if not given, over data-less tensors named and shaped like
    ``parameters``.

    The model is the same afterwards, object for object and bit for bit. Raises ValueError when the loader rejects a
    name, with that name.
    """
    sources = {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in parameters}
    last = ""

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in sources.items():
            last = name
            yield name, tensor

    with in_model_format(model) as tensors, _Recorder(sources, tensors) as recorder:
        recorder.recording.formats = {path: (tuple(t.shape), t.dtype) for path, t in tensors.items()}
        try:
            (load or model.load_weights)(stream())
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__}.load_weights rejects the checkpoint names, at or near {last!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return recorder.recording
