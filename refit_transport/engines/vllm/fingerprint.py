"""Hashes what the kernels of a vLLM model read, so that two engines can be compared without generating."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_PROBE_ROWS = 3
_WIDTHS = ("input_size_per_partition", "input_size", "embedding_dim")
_NOT_WEIGHTS = frozenset({"kv_cache"})


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Path to SHA-1 of every non-empty tensor of ``model``, derived ones included.

    CPU linears keep their weight inside a packed kernel only: those are probed with a fixed input and listed as
    ``<path>:output``. Engines of equal weights and equal kernels have equal fingerprints.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        held = {**module._parameters, **module._buffers}
        held.update((name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor))
        for name, tensor in held.items():
            if tensor is not None and name not in _NOT_WEIGHTS and tensor.numel() and not tensor.is_meta:
                found[f"{path}.{name}"] = _digest(tensor)
        if (output := _probe(module)) is not None:
            found[f"{path}:output"] = _digest(output)
    return found


def _probe(module: nn.Module) -> torch.Tensor | None:
    linear = getattr(module, "cpu_linear", None)
    if linear is None:
        return None
    columns = next(n for name in _WIDTHS if (n := getattr(module, name, None)))
    dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    probe = torch.randn(_PROBE_ROWS, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        return linear(probe, module.weight, None)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha1(data.numpy().tobytes()).hexdigest()
