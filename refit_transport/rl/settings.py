"""The options the loops read, under the keys users know, with their defaults.

These dataclasses are the list of keys and defaults: field names are the YAML keys below the section named in each
docstring. ``read`` takes what it knows from a section; that no key is unknown is the schema's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from refit_transport.rl.advantages import GaeLambdas
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.protocols import SamplingConfig

T = TypeVar("T")

ADVANTAGE_ESTIMATORS = ("grpo", "gdpo", "reinforce_plus_plus", "gae", "raw_reward")


@dataclass(frozen=True)
class RewardShaping:
    """``grpo.reward_shaping``, ``ppo.reward_shaping``."""

    enabled: bool = False
    overlong_buffer_length: int = 128
    overlong_buffer_penalty: float = 1.0
    max_response_length: int | None = None
    """None stands for ``policy.max_total_sequence_length``."""
    stop_properly_penalty_coef: float | None = None


@dataclass(frozen=True)
class RewardScaling:
    """``grpo.reward_scaling``, ``ppo.reward_scaling``."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


@dataclass(frozen=True)
class AdvantageEstimator:
    """``grpo.adv_estimator``, ``ppo.adv_estimator``."""

    name: str = "grpo"
    normalize_rewards: bool | None = None
    """None stands for ``grpo.normalize_rewards``."""
    use_leave_one_out_baseline: bool | None = None
    """None stands for ``grpo.use_leave_one_out_baseline``."""
    minus_baseline: bool = True
    reward_weights: dict[str, float] | None = None
    normalize_advantages: bool = True
    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    gae_lambda_value: float | None = None
    gae_lambda_policy: float | None = None
    length_adaptive_alpha: float = 0.0

    @property
    def lambdas(self) -> GaeLambdas:
        return GaeLambdas(self.gae_lambda, self.gae_lambda_value, self.gae_lambda_policy, self.length_adaptive_alpha)


@dataclass(frozen=True)
class LoopSettings:
    """What ``grpo.*`` and ``ppo.*`` have in common."""

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 16
    max_rollout_turns: int = 1
    max_num_epochs: int = 1
    max_num_steps: int = 1_000_000
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    val_period: int = 10
    val_start_at: int = -1
    val_at_start: bool = False
    val_at_end: bool = False
    val_batch_size: int = 256
    max_val_samples: int = 256
    val_num_generations_per_prompt: int = 1
    stop_at_validation_metric: str | None = None
    stop_at_validation_threshold: float | None = None
    seed: int = 42
    overlong_filtering: bool = False
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: int = 10
    batch_multiplier: float = 1
    skip_reference_policy_logprobs_calculation: bool = False
    seq_logprob_error_threshold: float | None = None
    reward_shaping: RewardShaping = field(default_factory=RewardShaping)
    reward_scaling: RewardScaling = field(default_factory=RewardScaling)
    adv_estimator: AdvantageEstimator = field(default_factory=AdvantageEstimator)

    def __post_init__(self) -> None:
        if found := self.violations():
            raise ValueError("\n".join(found))

    def violations(self) -> list[str]:
        """Every rule the options break: key, got, allowed."""
        found = []
        for key in ("num_prompts_per_step", "num_generations_per_prompt", "val_num_generations_per_prompt"):
            if getattr(self, key) < 1:
                found.append(f"{key}: got {getattr(self, key)}, allowed 1 or more")
        if self.max_rollout_turns != 1:
            found.append(f"max_rollout_turns: got {self.max_rollout_turns}, allowed 1 (tasks are single-turn)")
        if self.adv_estimator.name not in ADVANTAGE_ESTIMATORS:
            found.append(f"adv_estimator.name: got {self.adv_estimator.name!r}, allowed {ADVANTAGE_ESTIMATORS}")
        if self.batch_multiplier <= 0:
            found.append(f"batch_multiplier: got {self.batch_multiplier}, allowed above 0")
        if self.batch_multiplier != 1 and not self.use_dynamic_sampling:
            found.append(f"batch_multiplier: got {self.batch_multiplier}, needs use_dynamic_sampling: true")
        if (self.stop_at_validation_metric is None) != (self.stop_at_validation_threshold is None):
            found.append("stop_at_validation_metric and stop_at_validation_threshold: set both or neither")
        return found


@dataclass(frozen=True)
class AsyncSettings:
    """``grpo.async_grpo``."""

    enabled: bool = False
    max_trajectory_age_steps: int = 1
    """How many steps the engines may generate ahead of the trainer."""
    in_flight_weight_updates: bool = False


@dataclass(frozen=True)
class GrpoSettings(LoopSettings):
    """``grpo.*``."""

    async_grpo: AsyncSettings = field(default_factory=AsyncSettings)

    def violations(self) -> list[str]:
        found = super().violations()
        if self.adv_estimator.name == "gae":
            found.append("grpo.adv_estimator.name: got 'gae', which needs the values of PPO; allowed the others")
        if not self.async_grpo.enabled:
            return found
        if (age := self.async_grpo.max_trajectory_age_steps) < 1:
            found.append(f"async_grpo.max_trajectory_age_steps: got {age}, allowed 1 or more")
        if self.async_grpo.in_flight_weight_updates:
            found.append("async_grpo.in_flight_weight_updates: got true, allowed false (a refit waits for generation)")
        if self.use_dynamic_sampling:
            found.append("async_grpo.enabled: excludes use_dynamic_sampling; set one of them to false")
        return found


@dataclass(frozen=True)
class PpoSettings(LoopSettings):
    """``ppo.*``."""

    max_num_epochs: int = 100_000
    max_num_steps: int = 100_000
    val_period: int = 20
    val_at_start: bool = True
    skip_reference_policy_logprobs_calculation: bool = True
    ppo_epochs: int = 4
    policy_training_start_step: int = 0
    reward_shaping: RewardShaping = field(
        default_factory=lambda: RewardShaping(True, overlong_buffer_length=2048, max_response_length=14336)
    )
    reward_scaling: RewardScaling = field(default_factory=lambda: RewardScaling(True, target_min=-1.0))
    adv_estimator: AdvantageEstimator = field(default_factory=lambda: AdvantageEstimator("gae"))

    def violations(self) -> list[str]:
        found = super().violations()
        if self.ppo_epochs < 1:
            found.append(f"ppo_epochs: got {self.ppo_epochs}, allowed 1 or more")
        if self.adv_estimator.name not in ("gae", "raw_reward"):
            found.append(f"ppo.adv_estimator.name: got {self.adv_estimator.name!r}, allowed 'gae' or 'raw_reward'")
        return found


@dataclass(frozen=True)
class DataSettings:
    """``data.*``."""

    dataset_name: str = "reverse_digits"
    """A built-in task, or ``jsonl``."""
    train_path: str | None = None
    val_path: str | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    max_input_seq_length: int | None = None
    """Longer prompts are an error; None allows any."""
    shuffle: bool = True
    num_digits: int = 3
    """Of the built-in task ``reverse_digits``."""


@dataclass(frozen=True)
class EnvSettings:
    """``env.*``."""

    reward: str = "exact_match"
    """``exact_match``, or ``module:function``."""


@dataclass(frozen=True)
class CheckpointSettings:
    """``checkpointing.*``."""

    enabled: bool = True
    checkpoint_dir: str | None = None
    """None stands for ``checkpoints`` in the run's folder."""
    resume_from: str | None = None
    """A checkpoint, or a folder whose newest one to continue from, while the run has none of its own."""
    metric_name: str | None = "val:accuracy"
    higher_is_better: bool = True
    keep_top_k: int | None = 3
    save_period: int = 10
    checkpoint_must_save_by: str | None = None


@dataclass(frozen=True)
class GenerationSettings:
    """The sampling keys of ``policy.generation.*``."""

    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    val_temperature: float | None = None
    val_top_p: float | None = None
    val_top_k: int | None = None
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] | None = None

    def training(self, seed: int) -> SamplingConfig:
        return self._sampling(self.temperature, self.top_p, self.top_k, seed)

    def validation(self, seed: int) -> SamplingConfig:
        temperature = self.temperature if self.val_temperature is None else self.val_temperature
        top_p = self.top_p if self.val_top_p is None else self.val_top_p
        return self._sampling(temperature, top_p, self.top_k if self.val_top_k is None else self.val_top_k, seed)

    def _sampling(self, temperature: float, top_p: float, top_k: int | None, seed: int) -> SamplingConfig:
        stop_ids, stop_strings = tuple(self.stop_token_ids or ()), tuple(self.stop_strings or ())
        return SamplingConfig(self.max_new_tokens, temperature, top_p, top_k, stop_ids, stop_strings, seed)


def check_combination(settings: LoopSettings, loss: LossConfig) -> None:
    """Raises ValueError, a line each, for options of the loop and of the loss that contradict each other."""
    found = []
    estimator = settings.adv_estimator.name
    if loss.use_kl_in_reward and estimator not in ("reinforce_plus_plus", "gae"):
        found.append(
            f"loss_fn.use_kl_in_reward: got true with adv_estimator.name {estimator!r}, allowed with "
            "'reinforce_plus_plus' and 'gae'"
        )
    if loss.needs_reference_logprobs and settings.skip_reference_policy_logprobs_calculation:
        found.append(
            "skip_reference_policy_logprobs_calculation: got true with loss_fn.reference_policy_kl_penalty "
            f"{loss.reference_policy_kl_penalty}; set the penalty to 0 or the skip to false"
        )
    ahead = isinstance(settings, GrpoSettings) and settings.async_grpo.enabled
    if ahead and not loss.use_importance_sampling_correction:
        found.append("async_grpo.enabled: needs loss_fn.use_importance_sampling_correction: true")
    if ahead and loss.force_on_policy_ratio:
        found.append("async_grpo.enabled: excludes loss_fn.force_on_policy_ratio; set one of them to false")
    if found:
        raise ValueError("\n".join(found))


def read(kind: type[T], section: Mapping[str, Any] | None, **overrides: Any) -> T:
    """An instance of the dataclass ``kind`` from a configuration section; missing keys take their defaults, and nested
    dataclasses are read from nested sections over the default instance of the field."""
    defaults = kind()
    hints = get_type_hints(kind)
    section = {**(section or {}), **overrides}
    chosen = {}
    for entry in fields(kind):
        if entry.name not in section:
            chosen[entry.name] = getattr(defaults, entry.name)
        else:
            chosen[entry.name] = _value(hints[entry.name], section[entry.name], getattr(defaults, entry.name))
    return kind(**chosen)


def _value(hint: Any, given: Any, default: Any) -> Any:
    nested = next((kind for kind in (hint, *getattr(hint, "__args__", ())) if is_dataclass(kind)), None)
    if nested is None or given is None:
        return given
    base = {entry.name: getattr(default, entry.name) for entry in fields(nested)} if default is not None else {}
    return read(nested, {**base, **given})
