"""Stands in for TransformerEngine in multi-head latent attention, whose queries and values differ in width: Megatron's
own attention has one width for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


class PlainAttention(nn.Module):
    """Causal attention over [s, b, heads, width]; values may have a width of their own."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        scores = (q @ k.transpose(2, 3)) * (self.scale or q.shape[-1] ** -0.5)
        out = scores.masked_fill(attention_mask, float("-inf")).softmax(-1) @ v
        return out.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Models built inside use it."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import multi_latent_attention

    with (
        patch.object(LocalSpecProvider, "core_attention", lambda self: PlainAttention),
        patch.object(multi_latent_attention, "TELinear", _NoLinear),
    ):
        yield


class _NoLinear:
    """What no layer is an instance of; Megatron compares with None where TransformerEngine is missing."""
