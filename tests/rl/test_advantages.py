"""Advantages against slow loops, and at their edges."""

from __future__ import annotations

import statistics

import pytest
import torch

from refit_transport.rl.advantages import (
    GaeLambdas,
    gae,
    gae_advantages,
    gdpo_advantages,
    group_baseline,
    grpo_advantages,
    kl_reward,
    raw_reward_advantages,
    reinforce_plus_plus_advantages,
    token_rewards,
    z_score,
)

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 2.0, 0.25])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 0])


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_baseline_and_deviation_equal_the_loop_over_samples(leave_one_out: bool) -> None:
    baseline, std = group_baseline(REWARDS, GROUPS, leave_one_out)
    for i in range(len(REWARDS)):
        others = [
            float(REWARDS[j]) for j in range(len(REWARDS)) if GROUPS[j] == GROUPS[i] and not (leave_one_out and i == j)
        ]
        if int((GROUPS == GROUPS[i]).sum()) == 1:
            assert (baseline[i], std[i]) == (REWARDS[i], 0)
            continue
        assert baseline[i] == pytest.approx(statistics.fmean(others))
        assert std[i] == pytest.approx(statistics.stdev(others) if len(others) > 1 else 0.0, abs=1e-6)


def test_a_group_of_one_teaches_nothing() -> None:
    assert grpo_advantages(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]


def test_a_group_of_two_has_no_leave_one_out_deviation() -> None:
    assert grpo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0])).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])
def test_equal_rewards_give_zero_and_are_never_divided_by_rounding_noise(value: float) -> None:
    advantages = grpo_advantages(torch.full((16,), value), torch.zeros(16, dtype=torch.int64))
    assert advantages.abs().max() <= 1e-6 * max(1.0, abs(value))


def test_only_deviations_above_zero_divide() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    advantages = grpo_advantages(rewards, torch.zeros(4, dtype=torch.int64))
    assert advantages[0] == 1.0
    assert advantages[1] == pytest.approx(-(1 / 3) / (statistics.stdev([1, 0, 0]) + 1e-6), rel=1e-5)


def test_gdpo_weighs_components_and_standardises_the_batch() -> None:
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    parts = {"right": torch.tensor([1.0, 0, 0, 1, 1, 0]), "form": torch.tensor([0.2, 0.9, 0.1, 0.4, 0.6, 0.5])}
    got = gdpo_advantages(parts, groups, {"right": 2.0})
    raw = grpo_advantages(parts["form"], groups) + 2 * grpo_advantages(parts["right"], groups)
    torch.testing.assert_close(got, (raw - raw.mean()) / raw.std(unbiased=False))


@pytest.mark.parametrize(
    ("components", "weights"),
    [({"a": REWARDS}, None), ({"a": REWARDS, "b": REWARDS}, {"c": 1.0})],
    ids=["one component", "unknown weight"],
)
def test_gdpo_refuses_what_it_cannot_weigh(components: dict, weights: dict | None) -> None:
    with pytest.raises(ValueError, match="gdpo"):
        gdpo_advantages(components, GROUPS, weights)


MASK = torch.tensor([[0, 0, 1, 1, 1.0], [0, 1, 1, 0, 0]])


def test_reinforce_plus_plus_subtracts_the_plain_mean_and_kl() -> None:
    rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    kl = kl_reward(torch.full((2, 5), -1.0), torch.full((2, 5), -1.5), MASK, 0.5, "k1")
    got = reinforce_plus_plus_advantages(rewards, groups, MASK, kl)
    raw = torch.tensor([0.5, -0.5])[:, None] - 0.25 * MASK
    valid = raw[MASK.bool()]
    torch.testing.assert_close(got[MASK.bool()], (valid - valid.mean()) / valid.std(unbiased=False))
    assert not got[~MASK.bool()].any()


def test_constant_advantages_are_standardised_to_zero() -> None:
    assert not z_score(torch.full((2, 5), 0.7), MASK).abs().gt(1e-3).any()


def test_all_masked_batches_stay_finite() -> None:
    nothing = torch.zeros_like(MASK)
    assert not z_score(torch.ones(2, 5), nothing).any()
    assert not raw_reward_advantages(torch.ones(2), nothing, normalize=True).any()
    advantages, returns = gae_advantages(torch.zeros(2, 5), torch.ones(2, 5), nothing, 1.0, GaeLambdas())
    assert not advantages.any() and not returns.any()


def test_the_reward_lies_on_the_last_valid_token() -> None:
    placed = token_rewards(torch.tensor([3.0, 5.0]), MASK, extra=torch.full((2, 5), -0.1))
    torch.testing.assert_close(placed, torch.tensor([[0, 0, -0.1, -0.1, 2.9], [0, -0.1, 4.9, 0, 0]]))


def slow_gae(rewards: list[float], values: list[float], valid: list[bool], gamma: float, lam: float) -> list[float]:
    """GAE over the valid tokens alone, as if the others did not exist."""
    kept = [t for t, ok in enumerate(valid) if ok]
    advantages = [0.0] * len(values)
    for index, start in enumerate(kept):
        total, factor = 0.0, 1.0
        for position, t in enumerate(kept[index:], start=index):
            following = values[kept[position + 1]] if position + 1 < len(kept) else 0.0
            total += factor * (rewards[t] + gamma * following - values[t])
            factor *= gamma * lam
        advantages[start] = total
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_skips_masked_tokens_as_if_they_did_not_exist(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(5, 12, generator=generator) for _ in range(2))
    mask = (torch.rand(5, 12, generator=generator) < 0.6).float()
    mask[4] = 0
    advantages, returns = gae(rewards * mask, values, mask, gamma, lam)
    for row in range(5):
        expected = slow_gae(rewards[row].tolist(), values[row].tolist(), mask[row].bool().tolist(), gamma, lam)
        torch.testing.assert_close(advantages[row], torch.tensor(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, (advantages + values) * mask)


def test_lambda_one_returns_are_rewards_to_go() -> None:
    rewards, values = token_rewards(torch.tensor([2.0, 7.0]), MASK), torch.randn(2, 5)
    _, returns = gae(rewards, values, MASK, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([2.0, 7.0])[:, None] * MASK)


@pytest.mark.parametrize(
    ("lambdas", "value", "policy"),
    [
        (GaeLambdas(0.9), 0.9, [0.9, 0.9]),
        (GaeLambdas(0.9, gae_lambda_value=1.0), 1.0, [0.9, 0.9]),
        (GaeLambdas(0.9, gae_lambda_policy=0.5), 0.9, [0.5, 0.5]),
        (GaeLambdas(0.9, gae_lambda_policy=0.5, length_adaptive_alpha=0.5), 0.9, [1 - 1 / 1.5, 0.0]),
    ],
)
def test_lambda_priority(lambdas: GaeLambdas, value: float, policy: list[float]) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 5, generator=generator) * MASK, torch.randn(2, 5, generator=generator)
    advantages, returns = gae_advantages(rewards, values, MASK, 1.0, lambdas, normalize=False)
    torch.testing.assert_close(returns, gae(rewards, values, MASK, 1.0, value)[1])
    torch.testing.assert_close(advantages, gae(rewards, values, MASK, 1.0, torch.tensor(policy))[0])


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_valid_tokens() -> None:
    advantages, _ = gae_advantages(torch.randn(2, 5) * MASK, torch.randn(2, 5), MASK, 1.0, GaeLambdas())
    valid = advantages[MASK.bool()]
    assert valid.mean() == pytest.approx(0, abs=1e-6)
    assert valid.std(unbiased=False) == pytest.approx(1, abs=1e-4)
    assert not advantages[~MASK.bool()].any()
