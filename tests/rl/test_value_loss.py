"""The critic's loss against the loop over single tokens."""

from __future__ import annotations

import pytest
import torch

from refit_transport.rl.batch import Batch, batch_sums, select_rows
from refit_transport.rl.loss_config import ValueLossConfig
from refit_transport.rl.metrics import combine_parts
from refit_transport.rl.value_loss import ValueLoss, explained_variance


def value_batch() -> tuple[torch.Tensor, Batch]:
    """New values, and a batch of uneven rows of which one is masked out."""
    generator = torch.Generator().manual_seed(5)
    values, old, returns = (torch.randn(6, 9, generator=generator) for _ in range(3))
    mask = (torch.rand(6, 9, generator=generator) < 0.6).float()
    mask[:, 0] = 0
    sample_mask = torch.tensor([1.0, 1, 1, 0, 1, 1])
    return values, {"token_mask": mask, "sample_mask": sample_mask, "values": old, "returns": returns}


@pytest.mark.parametrize("cliprange", [None, 0.2])
def test_value_loss_equals_the_loop_over_single_tokens(cliprange: float | None) -> None:
    values, batch = value_batch()
    loss, metrics = ValueLoss(ValueLossConfig(scale=0.4, cliprange=cliprange))(values, batch, batch_sums(batch))
    errors, clipped = [], 0
    for b, t in (batch["token_mask"] * batch["sample_mask"][:, None]).nonzero().tolist():
        value, old, target = (float(x[b, t]) for x in (values, batch["values"], batch["returns"]))
        error = (value - target) ** 2
        if cliprange is not None:
            near = min(max(value, old - cliprange), old + cliprange)
            clipped += (near - target) ** 2 > error
            error = max(error, (near - target) ** 2)
        errors.append(error)
    assert loss == pytest.approx(0.5 * 0.4 * sum(errors) / len(errors), rel=1e-5)
    assert metrics["critic/clipfrac"] == pytest.approx(clipped / len(errors))


def test_value_loss_adds_up_over_micro_batches() -> None:
    values, batch = value_batch()
    loss = ValueLoss(ValueLossConfig(cliprange=0.2))
    whole, metrics = loss(values, batch, batch_sums(batch))
    pieces = (slice(0, 2), slice(2, 6))
    parts = [loss(values[piece], select_rows(batch, piece), batch_sums(batch)) for piece in pieces]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole), rel=1e-5)
    assert combine_parts([part[1] for part in parts]) == pytest.approx(combine_parts([metrics]), rel=1e-4)


def test_explained_variance_of_a_perfect_and_a_constant_critic() -> None:
    values, batch = value_batch()
    loss = ValueLoss(ValueLossConfig())
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    mean = (batch["returns"] * mask).sum() / mask.sum()
    for predicted, expected in ((batch["returns"], 1.0), (torch.full_like(values, float(mean)), 0.0)):
        metrics = combine_parts([loss(predicted, batch, batch_sums(batch))[1]])
        assert explained_variance(metrics) == pytest.approx(expected, abs=1e-5)
