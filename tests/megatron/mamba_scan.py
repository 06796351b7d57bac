"""Stands in for mamba_ssm, which has CUDA kernels only: the functions that Megatron's mixer trains with, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn


class GroupedRMSNorm(nn.Module):
    """Normalises groups of ``group_size``; the scan has applied the gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=kwargs.get("dtype")))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(grouped, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def split_conv1d_scan(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, *, headdim, ngroups, **_: Any
) -> torch.Tensor:
    """[b, s, inner]: convolution, then the recurrence token by token, then the gate."""
    length, heads = zxbcdt.shape[1], A.shape[0]
    inner, channels = heads * headdim, conv1d_weight.shape[0]
    z, xbc, dt = zxbcdt.split([inner, channels, heads], -1)
    padded = F.pad(xbc.mT, (conv1d_weight.shape[1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=channels)).mT
    x, b, c = xbc.split([inner, (channels - inner) // 2, (channels - inner) // 2], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (t.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    state, outputs = x.new_zeros(len(x), heads, headdim, b.shape[-1]), []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + x[:, t] * D[:, None])
    return torch.stack(outputs, 1).flatten(2) * F.silu(z)


@contextmanager
def mamba_in_torch() -> Iterator[None]:
    """Models with Mamba layers are built and run inside."""
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        from megatron.core.models.hybrid import hybrid_block as block
    except ImportError:  # before 0.19
        from megatron.core.ssm import mamba_block as block

    with (
        patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True),
        patch.object(mamba_mixer, "RMSNormGated", GroupedRMSNorm, create=True),
        patch.object(mamba_mixer, "ExtendedRMSNorm", GroupedRMSNorm, create=True),
        patch.object(mamba_mixer, "mamba_split_conv1d_scan_combined", split_conv1d_scan, create=True),
        patch.object(block, "TENorm", WrappedTorchNorm),
    ):
        yield
