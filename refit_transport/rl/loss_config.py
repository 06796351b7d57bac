"""Options of the policy and value losses, under the keys ``loss_fn.*`` and ``value_loss_fn.*``."""

from __future__ import annotations

from dataclasses import dataclass

IMPORTANCE_SAMPLING_TYPES = ("tis", "icepop", "seq-mask-tis")
KL_TYPES = ("k1", "k2", "k3")


@dataclass(frozen=True)
class LossConfig:
    """``loss_fn.*``. Raises ValueError on construction with every violation, one a line."""

    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    force_on_policy_ratio: bool = False
    use_kl_in_reward: bool = False
    use_cispo: bool = False
    disable_ppo_ratio: bool = False
    positive_example_nll_weight: float = 0.0

    def __post_init__(self) -> None:
        if found := self.violations():
            raise ValueError("\n".join(found))

    @property
    def loss_kl_penalty(self) -> float:
        """Weight of the KL term in the loss: zero when the penalty is part of the reward."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def needs_reference_logprobs(self) -> bool:
        return self.reference_policy_kl_penalty != 0

    @property
    def needs_prev_logprobs(self) -> bool:
        """False when the ratio is forced to 1, so that the trainer's log-probability pass can be skipped."""
        return not self.force_on_policy_ratio

    def violations(self) -> list[str]:
        """Every rule the options break: key, got, allowed."""
        return [*self._ratio_violations(), *self._importance_violations(), *self._kl_violations()]

    def _ratio_violations(self) -> list[str]:
        found = []
        if self.sequence_level_importance_ratios and self.token_level_loss:
            found.append(
                "loss_fn.sequence_level_importance_ratios: true needs a loss per sequence; set token_level_loss: false"
            )
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            found.append(f"loss_fn.ratio_clip_c: got {self.ratio_clip_c}, allowed null or a value above 1")
        for key in ("ratio_clip_min", "ratio_clip_max", "positive_example_nll_weight"):
            if getattr(self, key) < 0:
                found.append(f"loss_fn.{key}: got {getattr(self, key)}, allowed 0 or more")
        if self.disable_ppo_ratio and self.force_on_policy_ratio:
            found.append("loss_fn.force_on_policy_ratio: excludes disable_ppo_ratio; set one of them to false")
        if self.disable_ppo_ratio and self.sequence_level_importance_ratios:
            found.append(
                "loss_fn.disable_ppo_ratio: excludes sequence_level_importance_ratios; set one of them to false"
            )
        if self.use_cispo:
            found += self._cispo_violations()
        return found

    def _cispo_violations(self) -> list[str]:
        excluded = {
            "disable_ppo_ratio": self.disable_ppo_ratio,
            "force_on_policy_ratio": self.force_on_policy_ratio,
            "sequence_level_importance_ratios": self.sequence_level_importance_ratios,
            "ratio_clip_c": self.ratio_clip_c is not None,
        }
        found = [f"loss_fn.use_cispo: excludes {key}; unset one of them" for key, on in excluded.items() if on]
        if not self.token_level_loss:
            found.append("loss_fn.use_cispo: true needs token_level_loss: true")
        return found

    def _importance_violations(self) -> list[str]:
        kind, ratio = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        key = "loss_fn.truncated_importance_sampling"
        if kind is None:
            return [f"{key}_ratio: got {ratio}, needs {key}_type, one of {IMPORTANCE_SAMPLING_TYPES}"] if ratio else []
        found = []
        if kind not in IMPORTANCE_SAMPLING_TYPES:
            found.append(f"{key}_type: got {kind!r}, allowed null or one of {IMPORTANCE_SAMPLING_TYPES}")
        if ratio is None or ratio <= 0:
            found.append(f"{key}_ratio: got {ratio}, {kind} needs a value above 0")
        if kind in ("icepop", "seq-mask-tis") and self.truncated_importance_sampling_ratio_min is None:
            found.append(f"{key}_ratio_min: got null, {kind} needs a value")
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            found.append(f"{key}_type: seq-mask-tis excludes sequence_level_importance_ratios; use tis or icepop")
        if not self.use_importance_sampling_correction:
            found.append(f"{key}_type: got {kind!r}, needs use_importance_sampling_correction: true")
        return found

    def _kl_violations(self) -> list[str]:
        found = []
        if self.reference_policy_kl_type not in KL_TYPES:
            found.append(f"loss_fn.reference_policy_kl_type: got {self.reference_policy_kl_type!r}, allowed {KL_TYPES}")
        if self.reference_policy_kl_penalty < 0:
            found.append(
                f"loss_fn.reference_policy_kl_penalty: got {self.reference_policy_kl_penalty}, allowed 0 or more"
            )
        return found


@dataclass(frozen=True)
class ValueLossConfig:
    """``value_loss_fn.*``. ``cliprange`` null is plain mean squared error."""

    scale: float = 1.0
    cliprange: float | None = None

    def __post_init__(self) -> None:
        if self.cliprange is not None and self.cliprange <= 0:
            raise ValueError(f"value_loss_fn.cliprange: got {self.cliprange}, allowed null or a value above 0")
