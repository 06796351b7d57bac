"""Switches modules of a vLLM model between kernel format (what kernels read) and model format (what loaders write).

vLLM notes the model format of every tensor when it builds a model, before any loading or repacking. Here a module's
tensors are swapped for fresh ones in that format and later put back as they were, object for object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    SKIP_TENSORS,
    materialize_meta_tensor,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

EXPERT_MAPS = SKIP_LOAD_TENSORS - {"e_score_correction_bias"}
"""Buffers whose values loaders read to find their way. They are part of the layout, never of the weights."""

NEVER_NOTED = SKIP_TENSORS - EXPERT_MAPS
"""Loadable tensors of which vLLM notes no model format, because it never moves them."""


@dataclass
class KernelTensors:
    """What a module held in kernel format."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    non_persistent: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> KernelTensors:
        return cls(dict(module._parameters), dict(module._buffers), set(module._non_persistent_buffers_set))

    def put_back(self, module: nn.Module) -> None:
        for live, saved in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            live.clear()
            live.update(saved)
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(self.non_persistent)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of ``module`` itself."""
    return {n: t for d in (module._parameters, module._buffers) for n, t in d.items() if t is not None}


def model_format(module: nn.Module) -> dict[str, torch.Tensor]:
    """Meta tensors with the shapes, dtypes and loaders that the model's ``load_weights`` expects in ``module``.

    Buffers that are views of a parameter (kept by some Mamba layers) have none: they follow their parameter.
    """
    info = LAYERWISE_INFO.get(module)
    noted = {} if info is None else {**info.restore_metadata[0], **info.restore_metadata[1]}
    found = {}
    for name, tensor in tensors_of(module).items():
        if name in NEVER_NOTED:
            found[name] = _as_created(module, name, tensor)
    found.update((name, to_meta_tensor(tensor)) for name, tensor in noted.items())
    for name in EXPERT_MAPS & found.keys():
        del found[name]
    for tensor in found.values():
        restore_layer_refs(tensor, module)
        if getattr(tensor, "weight_loader", None) is not None:
            tensor.weight_loader = _get_original_loader(tensor)
    return found


def _as_created(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Such a tensor keeps its shape, but a CPU kernel widens a bias to float32,
    though the loader rounded it to the layer's dtype before."""
    meta = to_meta_tensor(tensor)
    if name == "bias" and isinstance(module, LinearBase) and meta.dtype != module.params_dtype:
        widened, meta = meta, torch.empty_like(meta, dtype=module.params_dtype)
        meta.__class__, meta.__dict__ = widened.__class__, widened.__dict__
    return meta


def replace(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Put ``tensors`` in the place of the module's own of the same names."""
    for name, tensor in tensors.items():
        (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = tensor


@contextmanager
def in_model_format(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Every module of ``model`` on the meta device in model format, by the path of each tensor; put back afterwards.

    Tied modules, which hold one Parameter, hold one meta tensor inside; it is listed under its first path.
    """
    saved: list[tuple[nn.Module, KernelTensors]] = []
    twins: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    paths: dict[str, torch.Tensor] = {}
    try:
        for path, module in model.named_modules():
            saved.append((module, KernelTensors.of(module)))
            metas = model_format(module)
            for name, kernel in tensors_of(module).items():
                if name in metas:
                    metas[name] = twins.setdefault(id(kernel), metas[name])
                elif name not in EXPERT_MAPS:
                    delattr(module, name)
            replace(module, metas)
            for name, tensor in metas.items():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    paths[f"{path}.{name}" if path else name] = tensor
        yield paths
    finally:
        for module, kernel in saved:
            kernel.put_back(module)


@dataclass
class StagedModule:
    """A module whose loadable tensors are in model format on the device, to be written and then processed."""

    path: str
    module: nn.Module
    kernel: KernelTensors = field(init=False)
    staging: dict[str, torch.Tensor] = field(init=False)

    @classmethod
    def open(
        cls, path: str, module: nn.Module, names: Iterable[str], zero: Iterable[str], device: torch.device
    ) -> StagedModule:
        """Give ``module`` fresh memory for ``names``. Those in ``zero`` have padding that no loader writes."""
        staged = cls(path, module)
        staged.kernel = KernelTensors.of(module)
        formats = model_format(module)
        with device:
            staged.staging = {name: materialize_meta_tensor(formats[name]) for name in names}
        for name in zero:
            staged.staging[name].zero_()
        replace(module, staged.staging)
        return staged

    def close(self, process: Callable[[nn.Module], None]) -> None:
        """Turn what was written into kernel format with ``process`` and copy it to where the kernels read.

        The kernel tensors keep their addresses, so captured graphs stay valid. The staging memory is released.
        """
        process(self.module)
        processed = tensors_of(self.module)
        for name, kernel in {**self.kernel.parameters, **self.kernel.buffers}.items():
            if kernel is None or processed.get(name) is kernel:
                continue
            new = processed.get(name)
            if new is None or new.shape != kernel.shape:
                self.discard()
                raise RuntimeError(
                    f"{self.path}.{name}: processing gave {None if new is None else tuple(new.shape)}, "
                    f"but its kernel reads {tuple(kernel.shape)}"
                )
            kernel.data.copy_(new.data)
        self.discard()

    def discard(self) -> None:
        """Put the kernel tensors back, whatever was written."""
        self.kernel.put_back(self.module)
        self.staging = {}
