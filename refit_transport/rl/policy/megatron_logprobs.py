"""Log-probabilities of tokens from logits whose vocabulary is spread over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refit_transport.rl.batch import Batch, loss_mask


def prediction_loss(predicted: Sequence[torch.Tensor], part: Batch, tokens: float) -> torch.Tensor:
    """Mean negative log-probability that prediction layers give to the tokens a loss counts, as this part's share of
    ``tokens`` in all. Column i of the k-th of ``predicted`` (from 1) belongs to column i + k of ``part``."""
    mask = loss_mask(part)
    found = [-(logprobs * mask[:, ahead:]).sum() for ahead, logprobs in enumerate(predicted, 1)]
    return torch.stack(found).mean() / max(tokens, 1.0)


def vocabulary_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, vocabulary: int, temperature: float, chunk_size: int | None
) -> torch.Tensor:
    """Float32 [b, s]: position i is log p(token i | tokens before i) under logits / temperature; position 0 is 0.

    ``logits`` [b, s, v / ranks] of any float dtype are this rank's columns of all v, of which the first ``vocabulary``
    are real and the others padding. ``chunk_size`` positions are done at a time (None: all at once). Every rank of the
    tensor-parallel group calls it.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_rank
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    width = logits.shape[2]
    column = torch.arange(width, device=logits.device) + get_tensor_model_parallel_rank() * width
    padding = column >= vocabulary
    targets = input_ids[:, 1:]
    step = chunk_size or max(1, targets.shape[1])
    # Rows too short to predict anything take part in the backward pass all the same: other ranks' collectives need it.
    parts = [logits[:, :1, :1].sum().float() * torch.zeros(len(input_ids), 1, device=logits.device)]
    for start in range(0, targets.shape[1], step):
        wanted = targets[:, start : start + step]
        # The cross entropy works in place, so that it needs a tensor of its own.
        scaled = logits[:, start : start + wanted.shape[1]].float() / temperature
        parts.append(-vocab_parallel_cross_entropy(scaled.masked_fill(padding, float("-inf")), wanted.contiguous()))
    return torch.cat(parts, dim=1)
