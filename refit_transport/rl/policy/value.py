"""The critic of PPO: the policy's backbone with a linear head that gives one value per token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from refit_transport.rl.batch import Batch
from refit_transport.rl.policy.loading import load_sharded
from refit_transport.rl.policy.worker import ModelWorker


class ValueModel(nn.Module):
    """The backbone of a causal language model and a linear head on its last hidden state."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.backbone = language_model.base_model
        width = language_model.config.get_text_config().hidden_size
        parameter = next(language_model.parameters())
        self.head = nn.Linear(width, 1, device=parameter.device, dtype=parameter.dtype)

    def reset_new_parameters(self) -> None:
        """The head starts at zero: a constant first guess."""
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Float32 [b, s]: position i is the value after token i."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.head(hidden)[..., 0].float()


class ValueWorker(ModelWorker):
    """The critic. ``config`` is the ``value.*`` sub-tree; ``train`` takes a loss on values, such as ``ValueLoss``."""

    def _load(self) -> nn.Module:
        return load_sharded(self.config, self.sizes, self.device, wrap=ValueModel)

    def _outputs(self, batch: Batch) -> torch.Tensor:
        # The value that belongs to token i is that of the state in which it was chosen: the tokens before it.
        return F.pad(self.model(batch["input_ids"])[:, :-1], (1, 0))

    def values(self, batch: Batch) -> torch.Tensor:
        """Float32 [len(rows), s] on CPU, aligned with ``input_ids`` like log-probabilities: position i is the value of
        the tokens before token i; position 0 and padding are 0."""
        return self.infer(batch)
