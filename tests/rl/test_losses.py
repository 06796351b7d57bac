"""The policy loss against its slow golden, and what must hold at its edges."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from refit_transport.rl.batch import Batch, batch_sums, select_rows
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.losses import ClippedPolicyLoss
from refit_transport.rl.metrics import average_updates, combine_parts
from tests.rl.golden_losses import gradient, policy_loss

NO_KL = {"reference_policy_kl_penalty": 0.0}
CORRECTED = {**NO_KL, "use_importance_sampling_correction": True}
TIGHT = {"truncated_importance_sampling_ratio": 1.1, "truncated_importance_sampling_ratio_min": 0.9}
OPTIONS = {
    "defaults": {},
    "asymmetric clip": {**NO_KL, "ratio_clip_min": 0.1, "ratio_clip_max": 0.28},
    "dual clip": {**NO_KL, "ratio_clip_c": 1.15},
    "sequence mean": {"token_level_loss": False},
    "gspo": {**NO_KL, "token_level_loss": False, "sequence_level_importance_ratios": True, "ratio_clip_max": 0.01},
    "cispo": {**NO_KL, "use_cispo": True, "ratio_clip_max": 0.1},
    "forced on policy": {**NO_KL, "force_on_policy_ratio": True},
    "no ratio": {**NO_KL, "disable_ppo_ratio": True},
    "importance": CORRECTED,
    "tis": {**CORRECTED, "truncated_importance_sampling_type": "tis", **TIGHT},
    "icepop": {**CORRECTED, "truncated_importance_sampling_type": "icepop", **TIGHT},
    "seq-mask-tis": {**CORRECTED, "truncated_importance_sampling_type": "seq-mask-tis", **TIGHT},
    "gspo with tis": {
        **CORRECTED,
        **TIGHT,
        "truncated_importance_sampling_type": "tis",
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
    },
    "k1": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2"},
    "k3 clamped": {"reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": 0.1, "kl_output_clamp_value": 0.003},
    "on-policy kl": {"reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True},
    "kl in reward": {"reference_policy_kl_penalty": 0.3, "use_kl_in_reward": True},
    "positive nll": {**NO_KL, "positive_example_nll_weight": 0.5},
}


def make_batch(rows: int = 6, width: int = 9, seed: int = 0) -> tuple[torch.Tensor, Batch]:
    """Log-probabilities and a batch of uneven rows: a masked gap in row 1, no token in row 2, row 3 masked out."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=generator)

    mask = torch.zeros(rows, width)
    for row in range(rows):
        mask[row, 2 : 4 + row] = 1
    mask[1, 3] = 0
    mask[2] = 0
    sample_mask = torch.ones(rows)
    sample_mask[3] = 0
    generation = -noise(1.0).abs() - 0.1
    previous = generation + noise(0.1)
    current = previous + noise(0.15)
    batch = {
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
        "token_mask": mask,
        "sample_mask": sample_mask,
        "generation_logprobs": generation,
        "prev_logprobs": previous,
        "reference_policy_logprobs": current + noise(0.3),
        "advantages": noise(1.0),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0, -1.0, 1.0][:rows]),
    }
    return current, batch


def run(config: LossConfig, logprobs: torch.Tensor, batch: Batch, sums: dict[str, float] | None = None) -> tuple:
    """Loss, metrics and gradient."""
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = ClippedPolicyLoss(config)(leaf, batch, sums or batch_sums(batch))
    loss.backward()
    return loss.detach(), metrics, leaf.grad


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_equals_the_loop_over_single_tokens(options: dict) -> None:
    logprobs, batch = make_batch()
    # The golden counts a sequence without tokens as a sequence with mean zero, as the loss does.
    loss, _, _ = run(LossConfig(**options), logprobs, batch)
    assert loss == pytest.approx(policy_loss(logprobs.tolist(), batch, LossConfig(**options)), abs=2e-6)


SMOOTH = ("asymmetric clip", "dual clip", "gspo", "no ratio", "importance", "icepop", "gspo with tis", "positive nll")


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_equals_finite_differences(name: str) -> None:
    logprobs, batch = make_batch(seed=3)
    config = LossConfig(**OPTIONS[name])
    _, _, grad = run(config, logprobs, batch)
    for b, t in ((0, 2), (1, 4), (4, 5), (5, 8), (3, 3)):
        numeric = gradient(lambda values: policy_loss(values, batch, config), logprobs.tolist(), b, t)
        assert grad[b, t] == pytest.approx(numeric, abs=1e-4)


def test_forced_on_policy_gradient_is_reinforce() -> None:
    logprobs, batch = make_batch()
    _, _, grad = run(LossConfig(**OPTIONS["forced on policy"]), logprobs, batch)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    torch.testing.assert_close(grad, -batch["advantages"] * mask / mask.sum())


def test_cispo_gradient_survives_the_clip() -> None:
    logprobs, batch = make_batch()
    config = LossConfig(**OPTIONS["cispo"])
    _, _, grad = run(config, logprobs, batch)
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    clipped = (logprobs - batch["prev_logprobs"]).exp().clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    torch.testing.assert_close(grad, -batch["advantages"] * clipped * mask / mask.sum())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_has_the_score_function_term(kind: str) -> None:
    """For tokens sampled from the current policy the expected gradient is that of the exact KL."""
    logits = torch.tensor([0.3, -0.5, 1.1, 0.0], requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.2, 0.6]).log_softmax(-1)
    config = LossConfig(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
    logprobs = logits.log_softmax(-1)
    # One row per token of the vocabulary, weighted by its probability: the expectation, exactly.
    columns = torch.stack([torch.zeros(4), logprobs], dim=1)
    gradients = []
    for token in range(4):
        batch = {
            "token_mask": torch.tensor([[0.0, 1.0]]),
            "sample_mask": torch.ones(1),
            "generation_logprobs": columns[token : token + 1].detach(),
            "prev_logprobs": columns[token : token + 1].detach(),
            "reference_policy_logprobs": torch.stack([torch.zeros(1), reference[token : token + 1]], dim=1),
            "advantages": torch.zeros(1, 2),
            "rewards": torch.zeros(1),
        }
        loss, _ = ClippedPolicyLoss(config)(columns[token : token + 1], batch, batch_sums(batch))
        gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
    expected = (logprobs.exp().detach()[:, None] * torch.stack(gradients)).sum(0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)[0]
    if kind == "k2":
        # k2 is biased: its expectation is half the mean square, and that is what its gradient belongs to.
        again = logits.log_softmax(-1)
        exact = torch.autograd.grad((again.exp() * 0.5 * (again - reference).square()).sum(), logits)[0]
    torch.testing.assert_close(expected, exact, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("cuts", [(1, 2, 3), (3, 3), (5, 1)])
def test_micro_batches_add_up_to_the_global_batch(options: dict, cuts: tuple[int, ...]) -> None:
    logprobs, batch = make_batch()
    config = LossConfig(**options)
    whole_loss, whole_metrics, whole_grad = run(config, logprobs, batch)
    starts = [sum(cuts[:index]) for index in range(len(cuts))]
    pieces = [slice(start, start + cut) for start, cut in zip(starts, cuts, strict=True)]
    found = [batch_sums(select_rows(batch, piece)) for piece in pieces]
    sums = {name: sum(part[name] for part in found) for name in found[0]}
    assert sums == batch_sums(batch)
    parts = [run(config, logprobs[piece], select_rows(batch, piece), sums) for piece in pieces]
    assert sum(part[0] for part in parts) == pytest.approx(float(whole_loss), abs=1e-6)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), whole_grad)
    assert combine_parts([part[1] for part in parts]) == pytest.approx(combine_parts([whole_metrics]), abs=1e-5)


def test_metrics_have_the_values_their_names_promise() -> None:
    logprobs, batch = make_batch()
    _, metrics, _ = run(LossConfig(**CORRECTED), logprobs, batch)
    mask = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
    gen, prev, now = batch["generation_logprobs"][mask], batch["prev_logprobs"][mask], logprobs[mask]
    mixture = (0.5 * (gen.exp() + prev.exp())).log()
    expected = {
        "token_mult_prob_error": (gen - prev).abs().exp().mean(),
        "gen_kl_error": ((prev - gen).exp() - 1 - (prev - gen)).mean(),
        "policy_kl_error": ((gen - prev).exp() - 1 - (gen - prev)).mean(),
        "js_divergence_error": 0.5
        * (((mixture - prev).exp() - 1 - (mixture - prev)) + ((mixture - gen).exp() - 1 - (mixture - gen))).mean(),
        "sampling_importance_ratio": (prev - gen).exp().mean(),
        "approx_entropy": -((now - gen).exp() * now).mean(),
        "probs_ratio": (now - prev).exp().mean(),
        "probs_ratio_max": (now - prev).exp().max(),
        "probs_ratio_clamped": (now - prev).exp().clamp(0.8, 1.2).mean(),
        "probs_ratio_clamped_min": (now - prev).exp().clamp(0.8, 1.2).min(),
        "num_valid_samples": torch.tensor(5.0),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
    assert not any(value.requires_grad for value in metrics.values())


def test_share_of_truncated_weights_is_reported() -> None:
    logprobs, batch = make_batch()
    _, metrics, _ = run(LossConfig(**OPTIONS["icepop"]), logprobs, batch)
    mask = (batch["token_mask"] * batch["sample_mask"][:, None]).bool()
    ratio = (batch["prev_logprobs"] - batch["generation_logprobs"]).exp()[mask]
    assert metrics["is_oob_ratio"] == pytest.approx(float(((ratio < 0.9) | (ratio > 1.1)).float().mean()))
    assert 0 < metrics["is_oob_ratio"] < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["importance", "tis", "icepop", "seq-mask-tis"])
def test_a_token_with_a_weight_that_is_not_finite_does_not_train(name: str, bad: float) -> None:
    logprobs, batch = make_batch()
    batch["generation_logprobs"][0, 2] = bad
    loss, _, grad = run(LossConfig(**OPTIONS[name]), logprobs, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    if not (bad == math.inf and name == "tis"):
        assert grad[0, 2] == 0


@pytest.mark.parametrize("key", ["generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages"])
def test_masked_positions_may_hold_anything(key: str) -> None:
    logprobs, batch = make_batch()
    clean = run(LossConfig(), logprobs, batch)
    masked_out = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    batch[key] = torch.where(masked_out, math.nan, batch[key])
    dirty = run(LossConfig(), torch.where(masked_out, -math.inf, logprobs), batch)
    assert dirty[0] == clean[0]
    torch.testing.assert_close(dirty[2], clean[2])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_batch_without_valid_tokens_has_zero_loss_and_gradient(options: dict) -> None:
    logprobs, batch = make_batch()
    batch["sample_mask"] = torch.zeros_like(batch["sample_mask"])
    loss, metrics, grad = run(LossConfig(**options), logprobs, batch)
    assert loss == 0
    assert not grad.any()
    assert metrics["token_mult_prob_error"] == 0


def test_loss_can_be_sent_to_another_process() -> None:
    logprobs, batch = make_batch()
    loss = pickle.loads(pickle.dumps(ClippedPolicyLoss(LossConfig(ratio_clip_c=3.0))))
    assert loss(logprobs, batch, batch_sums(batch))[0] == run(LossConfig(ratio_clip_c=3.0), logprobs, batch)[0]


VIOLATIONS = {
    "gspo needs sequence loss": ({"sequence_level_importance_ratios": True}, 1),
    "cispo excludes four and needs tokens": (
        {
            "use_cispo": True,
            "disable_ppo_ratio": True,
            "ratio_clip_c": 3.0,
            "token_level_loss": False,
        },
        3,
    ),
    "dual clip above one": ({"ratio_clip_c": 1.0}, 1),
    "unknown truncation": (
        {
            "truncated_importance_sampling_type": "tiss",
            "truncated_importance_sampling_ratio": 2.0,
            "use_importance_sampling_correction": True,
        },
        1,
    ),
    "icepop needs bounds": (
        {"truncated_importance_sampling_type": "icepop", "use_importance_sampling_correction": True},
        2,
    ),
    "truncation needs correction": (
        {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
        1,
    ),
    "unknown kl": ({"reference_policy_kl_type": "k4"}, 1),
}


@pytest.mark.parametrize(("options", "count"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_every_contradiction_is_named_at_once(options: dict, count: int) -> None:
    with pytest.raises(ValueError, match="loss_fn") as error:
        LossConfig(**options)
    assert len(str(error.value).splitlines()) == count


def test_updates_are_averaged_but_counts_add_and_extremes_stay() -> None:
    updates = [
        {"loss": 1.0, "num_valid_samples": 4.0, "probs_ratio_min": 0.5, "probs_ratio_max": 1.5},
        {"loss": 3.0, "num_valid_samples": 2.0, "probs_ratio_min": 0.7, "probs_ratio_max": 1.9},
    ]
    assert average_updates(updates) == {
        "loss": 2.0,
        "num_valid_samples": 6.0,
        "probs_ratio_min": 0.5,
        "probs_ratio_max": 1.9,
    }
