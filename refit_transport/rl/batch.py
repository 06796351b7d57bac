"""The tensors of one training step and the sums its losses are normalised by.

All per-token tensors are aligned with ``input_ids``: index t holds what belongs to token t, and index 0 (which has no
log-probability) holds zero. Rows are padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Batch = dict[str, torch.Tensor]
"""Keys, with B samples and S tokens:

================================ ======== ========= ==========================================================
``input_ids``                    [B, S]   int64     prompt and completion, padded with the pad token
``input_lengths``                [B]      int64     tokens before the padding
``token_mask``                   [B, S]   float32   1 on generated tokens, 0 on prompt and padding
``sample_mask``                  [B]      float32   0 for samples that must not be trained on
``generation_logprobs``          [B, S]   float32   as the engine reported them
``prev_logprobs``                [B, S]   float32   of the trainer, before the update
``reference_policy_logprobs``    [B, S]   float32   of the frozen initial policy, where a KL penalty needs them
``rewards``                      [B]      float32   after scaling and shaping
``advantages``                   [B, S]   float32
``values``, ``returns``          [B, S]   float32   PPO only
================================ ======== ========= ==========================================================
"""


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def pad_sequences(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    generation_logprobs: Sequence[Sequence[float]],
    pad_token_id: int,
    length_multiple: int = 1,
) -> Batch:
    """Batch of B samples, padded on the right to a length divisible by ``length_multiple``. Raises ValueError when a
    completion and its log-probabilities differ in length, or a prompt is empty (its first token would have no
    context)."""
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    size = (len(prompts), round_up(longest, length_multiple))
    batch = {
        "input_ids": torch.full(size, pad_token_id, dtype=torch.int64),
        "input_lengths": torch.zeros(size[0], dtype=torch.int64),
        "token_mask": torch.zeros(size),
        "sample_mask": torch.ones(size[0]),
        "generation_logprobs": torch.zeros(size),
    }
    for row, (prompt, completion, logprobs) in enumerate(zip(prompts, completions, generation_logprobs, strict=True)):
        if len(completion) != len(logprobs):
            raise ValueError(f"sample {row}: {len(completion)} generated tokens but {len(logprobs)} log-probabilities")
        if not prompt:
            raise ValueError(f"sample {row}: the prompt has no token")
        start, stop = len(prompt), len(prompt) + len(completion)
        batch["input_ids"][row, :stop] = torch.tensor([*prompt, *completion])
        batch["input_lengths"][row] = stop
        batch["token_mask"][row, start:stop] = 1.0
        batch["generation_logprobs"][row, start:stop] = torch.tensor(logprobs, dtype=torch.float32)
    return batch


def loss_mask(batch: Batch) -> torch.Tensor:
    """[B, S] float32: 1 on the tokens a loss counts."""
    mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
    mask[:, 0] = 0.0
    return mask


def batch_sums(batch: Batch) -> dict[str, float]:
    """What losses are divided by, for this part of a global batch. Add the parts over micro-batches and data-parallel
    ranks to get the ``sums`` of the global batch that every loss call of the optimizer step receives."""
    mask = loss_mask(batch)
    sums = {"tokens": float(mask.sum()), "sequences": float(batch["sample_mask"].sum())}
    if "rewards" in batch:
        sums["positive_tokens"] = float(mask[batch["rewards"] > 0].sum())
    return sums


def select_rows(batch: Batch, rows: slice | torch.Tensor) -> Batch:
    """The samples ``rows`` of a batch; slices give views."""
    return {name: tensor[rows] for name, tensor in batch.items()}
