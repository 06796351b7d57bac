"""Log-probabilities of the tokens of a batch from a model's logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, temperature: float = 1.0, chunk_size: int | None = None
) -> torch.Tensor:
    """Float32 [b, s]: position i is log p(token i | tokens before i) under logits / temperature; position 0 is 0.

    ``logits`` [b, s, v] of any float dtype; the softmax is float32. ``chunk_size`` positions are done at a time, so
    that no float32 copy of all logits exists (None: all at once).
    """
    targets = input_ids[:, 1:]
    step = chunk_size or max(1, targets.shape[1])
    parts = [
        _logprobs(
            logits[:, at : at + step][:, : targets[:, at : at + step].shape[1]], targets[:, at : at + step], temperature
        )
        for at in range(0, targets.shape[1], step)
    ]
    first = torch.zeros(input_ids.shape[0], 1, dtype=torch.float32, device=logits.device)
    return torch.cat([first, *parts], dim=1)


def _logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    return -F.cross_entropy(scaled.transpose(1, 2), targets, reduction="none")
