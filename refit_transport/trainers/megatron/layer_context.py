"""A transformer layer as the rules on its tensors see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from re import Match
from typing import Any

import torch
from torch import nn

from .fusion import Fused
from .names import CheckpointNames


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The live layer, and where it is in the checkpoint."""

    module: nn.Module
    prefix: str
    """``model.layers.3``."""
    names: CheckpointNames

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig that the layer was built with."""
        return self.module.config

    def attention(self, tensor: str) -> str:
        return f"{self.prefix}.{self.names.attention}.{tensor}"


Composed = Sequence[tuple[torch.Tensor, Fused]]
"""Views of a parameter, and what each is made of. Most parameters are one."""

Rule = Callable[[LayerContext, Match[str], torch.Tensor], Composed]
"""From the layer, the match of the parameter's name inside it, and the parameter."""

Rules = dict[str, Rule]
"""By regular expression that the whole name matches."""
