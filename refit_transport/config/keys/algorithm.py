"""Keys of the algorithms: `grpo.*`, `ppo.*`, `loss_fn.*`, `value_loss_fn.*`."""

from __future__ import annotations

from refit_transport.config.key import Key, section


def _loop(steps: int, epochs: int, val_period: int, val_at_start: bool) -> tuple[Key, ...]:
    """The outer loop, equal in both algorithms but for its defaults."""
    return (
        Key("num_prompts_per_step", int, 32, "Prompts per step.", minimum=1),
        Key("num_generations_per_prompt", int, 16, "Answers per prompt.", minimum=1),
        Key("max_num_steps", int, steps, "Stop after this many steps.", minimum=0),
        Key("max_num_epochs", int, epochs, "Passes over the data.", minimum=1),
        Key("seed", int, 42, "Seed of sampling, shuffling and dropout.", minimum=0),
        Key("val_period", int, val_period, "Validate each so many steps; 0 never.", minimum=0),
        Key("val_start_at", int, -1, "First step after which validation may run.", minimum=-1),
        Key("val_at_start", bool, val_at_start, "Validate before the first step."),
        Key("val_at_end", bool, False, "Validate after the last step."),
        Key("val_batch_size", int, 256, "Prompts per validation batch.", minimum=1),
        Key("max_val_samples", int, 256, "Prompts per validation.", minimum=1),
        Key(
            "val_num_generations_per_prompt",
            int,
            1,
            "Answers per prompt in validation; above 1 gives pass@k.",
            minimum=1,
        ),
        Key("stop_at_validation_metric", str, None, "Stop early when this metric ..."),
        Key("stop_at_validation_threshold", float, None, "... reaches this value."),
    )


def _rewards(shaping: bool, buffer: int, length: int | str, scaling: bool, low: float) -> tuple[Key, ...]:
    """Scaling and shaping of rewards."""
    return (
        Key("reward_scaling.enabled", bool, scaling, "Map rewards from the source range onto the target range."),
        Key("reward_scaling.source_min", float, 0.0, "Low end of the source range."),
        Key("reward_scaling.source_max", float, 1.0, "High end of the source range."),
        Key("reward_scaling.target_min", float, low, "Low end of the target range."),
        Key("reward_scaling.target_max", float, 1.0, "High end of the target range."),
        Key("reward_shaping.enabled", bool, shaping, "Penalise answers that come close to the longest length."),
        Key("reward_shaping.overlong_buffer_length", int, buffer, "Tokens over which the penalty grows.", minimum=1),
        Key("reward_shaping.overlong_buffer_penalty", float, 1.0, "Penalty at the longest length.", minimum=0),
        Key("reward_shaping.max_response_length", int, length, "The longest length, in tokens.", minimum=1),
        Key(
            "reward_shaping.stop_properly_penalty_coef",
            float,
            None,
            "Multiply rewards of truncated answers by this instead.",
            minimum=0,
            maximum=1,
        ),
    )


GRPO = section(
    "grpo",
    "GRPO",
    "Group-relative policy optimisation.",
    *_loop(1_000_000, 1, 10, False),
    Key("max_rollout_turns", int, 1, "Turns per conversation.", choices=(1,)),
    Key("normalize_rewards", bool, True, "Divide advantages by the group's standard deviation."),
    Key("use_leave_one_out_baseline", bool, True, "An answer's baseline is the mean of the others."),
    Key("advantage_clip_low", float, None, "Advantages are clipped from below."),
    Key("advantage_clip_high", float, None, "Advantages are clipped from above."),
    Key("overlong_filtering", bool, False, "Truncated answers do not train."),
    Key("use_dynamic_sampling", bool, False, "Drop prompts whose answers all earn the same, and draw others."),
    Key("dynamic_sampling_max_gen_batches", int, 10, "Most batches drawn for one step.", minimum=1),
    Key("batch_multiplier", float, 1.0, "Prompts drawn at once, in steps, when sampling dynamically.", above=0),
    Key("async_grpo.enabled", bool, False, "Engines generate for the next steps while the trainer trains."),
    Key(
        "async_grpo.max_trajectory_age_steps",
        int,
        1,
        "Most versions by which a rollout's weights may be older.",
        minimum=1,
    ),
    Key(
        "async_grpo.in_flight_weight_updates",
        bool,
        False,
        "Refit while requests run. A refit waits for the generation in progress instead.",
        choices=(False,),
    ),
    Key("skip_reference_policy_logprobs_calculation", bool, False, "Do not run the reference model."),
    Key(
        "seq_logprob_error_threshold",
        float,
        None,
        "Answers whose engine and trainer disagree more do not train.",
        above=1,
    ),
    Key(
        "adv_estimator.name",
        str,
        "grpo",
        "How advantages are estimated.",
        choices=("grpo", "gdpo", "reinforce_plus_plus"),
    ),
    Key("adv_estimator.reward_weights", dict, None, "Weight of each named reward (`gdpo`); null weighs them alike."),
    Key("adv_estimator.normalize_rewards", bool, "${grpo.normalize_rewards}", "As `grpo.normalize_rewards`."),
    Key(
        "adv_estimator.use_leave_one_out_baseline",
        bool,
        "${grpo.use_leave_one_out_baseline}",
        "As `grpo.use_leave_one_out_baseline`.",
    ),
    Key("adv_estimator.minus_baseline", bool, True, "Subtract the prompt's mean (`reinforce_plus_plus`)."),
    *_rewards(False, 128, "${policy.max_total_sequence_length}", False, 0.0),
)

PPO = section(
    "ppo",
    "PPO",
    "Proximal policy optimisation with a value model.",
    *_loop(100_000, 100_000, 20, True),
    Key("max_rollout_turns", int, 1, "Turns per conversation.", choices=(1,)),
    Key("ppo_epochs", int, 4, "Passes over one step's batch.", minimum=1),
    Key("policy_training_start_step", int, 0, "Train only the value model before this step.", minimum=0),
    Key("overlong_filtering", bool, False, "Truncated answers do not train."),
    Key("skip_reference_policy_logprobs_calculation", bool, True, "Do not run the reference model."),
    Key(
        "seq_logprob_error_threshold",
        float,
        None,
        "Answers whose engine and trainer disagree more do not train.",
        above=1,
    ),
    Key("advantage_clip_low", float, None, "Advantages are clipped from below."),
    Key("advantage_clip_high", float, None, "Advantages are clipped from above."),
    Key("adv_estimator.name", str, "gae", "How advantages are estimated.", choices=("gae", "raw_reward")),
    Key("adv_estimator.gae_lambda", float, 0.95, "Lambda of returns and advantages.", minimum=0, maximum=1),
    Key("adv_estimator.gae_gamma", float, 1.0, "Discount.", minimum=0, maximum=1),
    Key("adv_estimator.normalize_advantages", bool, True, "Whiten advantages over valid tokens."),
    Key("adv_estimator.gae_lambda_value", float, None, "Lambda of returns alone.", minimum=0, maximum=1),
    Key("adv_estimator.gae_lambda_policy", float, None, "Lambda of advantages alone.", minimum=0, maximum=1),
    Key("adv_estimator.length_adaptive_alpha", float, 0.0, "Lambda from the answer's length when above 0.", minimum=0),
    *_rewards(True, 2048, 14336, True, -1.0),
)

LOSS = section(
    "loss_fn",
    "Policy loss",
    "Clipped policy-gradient loss, normalised over the global batch.",
    Key("reference_policy_kl_penalty", float, 0.01, "Weight of the KL term; 0 leaves it out.", minimum=0),
    Key("reference_policy_kl_type", str, "k3", "Estimator of the KL term.", choices=("k1", "k2", "k3")),
    Key("kl_input_clamp_value", float, 20.0, "The log-ratio is clamped to this.", above=0, optional=True),
    Key("kl_output_clamp_value", float, 10.0, "The KL term is clamped to this.", above=0, optional=True),
    Key("ratio_clip_min", float, 0.2, "The ratio is clipped at 1 - this.", minimum=0),
    Key("ratio_clip_max", float, 0.2, "The ratio is clipped at 1 + this.", minimum=0),
    Key("ratio_clip_c", float, None, "Dual clip: bound of the loss where the advantage is negative.", above=1),
    Key("use_on_policy_kl_approximation", bool, False, "Weight the KL term by the engine's log-probabilities."),
    Key("use_importance_sampling_correction", bool, False, "Weight tokens by trainer over engine probability."),
    Key(
        "truncated_importance_sampling_type",
        str,
        None,
        "What happens to weights outside the bounds.",
        choices=("tis", "icepop", "seq-mask-tis"),
    ),
    Key("truncated_importance_sampling_ratio", float, None, "Upper bound of the weight.", above=0),
    Key("truncated_importance_sampling_ratio_min", float, None, "Lower bound of the weight.", minimum=0),
    Key("sequence_level_importance_ratios", bool, False, "One ratio per answer (GSPO)."),
    Key("token_level_loss", bool, True, "Average over tokens; `false` averages over answers."),
    Key("force_on_policy_ratio", bool, False, "Hold the ratio at 1."),
    Key("use_kl_in_reward", bool, False, "Subtract the KL term from rewards instead of adding it to the loss."),
    Key("use_cispo", bool, False, "Clip the ratio without clipping the gradient."),
    Key("disable_ppo_ratio", bool, False, "Plain policy gradient."),
    Key("positive_example_nll_weight", float, 0.0, "Weight of a likelihood term on rewarded answers.", minimum=0),
)

VALUE_LOSS = section(
    "value_loss_fn",
    "Value loss (PPO)",
    "Squared error of the value model.",
    Key("scale", float, 0.4, "Factor of the loss.", above=0),
    Key(
        "cliprange",
        float,
        0.2,
        "New values stay this close to the old ones; null clips nothing.",
        above=0,
        optional=True,
    ),
)
