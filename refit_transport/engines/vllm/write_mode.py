"""How the weights of a vLLM module may be written: straight into what its kernels read, or staged and processed."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from .model_format import model_format, tensors_of

MOE_BACKENDS_IN_MODEL_FORMAT = frozenset({"TRITON", "BATCHED_TRITON"})
"""Expert kernels on CUDA that read the weights as loaded. Others pad, swap or permute them, some without changing a
shape, so neither shape nor stride can tell."""

MOE_BACKENDS_REFUSED = frozenset({"MOONEP"})
"""Expert kernels that keep parts of the weights where no loader can reach them again."""


class WriteMode(StrEnum):
    """Where bytes for a module go."""

    LIVE = "live"
    """Into the tensors that the kernels read."""
    STAGED = "staged"
    """Into fresh tensors in model format; once complete they are processed and copied to the kernel tensors."""


def write_mode(path: str, module: nn.Module, device: torch.device) -> WriteMode:
    """The mode of ``module``, decided by its quantisation method and kernel backend, never by shapes alone.

    Raises ValueError for a module whose kernel format cannot be refreshed.
    """
    method = getattr(module, "quant_method", None)
    same = _kernel_is_in_model_format(module)
    if not isinstance(method, QuantizeMethodBase):
        if same:
            return WriteMode.LIVE
        raise ValueError(f"{path} ({type(module).__name__}): its tensors changed after loading, by an unknown step")
    if isinstance(method, UnquantizedFusedMoEMethod):
        backend = method.unquantized_backend.name
        if backend in MOE_BACKENDS_REFUSED:
            raise ValueError(
                f"{path}: expert backend {backend} cannot be refreshed; choose another with VLLM_MOE_BACKEND"
            )
        live = device.type == "cuda" and backend in MOE_BACKENDS_IN_MODEL_FORMAT
    elif type(method) is UnquantizedEmbeddingMethod:
        live = True
    elif type(method) is UnquantizedLinearMethod:
        live = device.type == "cuda" or getattr(module, "cpu_linear", None) is torch.nn.functional.linear
    else:
        live = False
    return WriteMode.LIVE if live and same else WriteMode.STAGED


def _kernel_is_in_model_format(module: nn.Module) -> bool:
    kernel = tensors_of(module)
    return all(
        name in kernel
        and (kernel[name].shape, kernel[name].dtype, kernel[name].stride()) == (t.shape, t.dtype, t.stride())
        for name, t in model_format(module).items()
        if name not in module._non_persistent_buffers_set
    )
