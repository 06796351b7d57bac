"""Rules on batches, losses, data and ports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from refit_transport.config.key import DOCUMENT, anchor_id, as_yaml
from refit_transport.config.setup import Setup
from refit_transport.config.violation import Violation

Found = Iterator[Violation]
BATCHES = f"{DOCUMENT}#batches"
LOSS = f"{DOCUMENT}#loss"


def training_rules(setup: Setup) -> Found:
    """Violations of every rule on how a run trains."""
    for rule in _RULES:
        yield from rule(setup)


def _batches_divide(setup: Setup) -> Found:
    section = setup.get(setup.algorithm)
    rollouts = section["num_prompts_per_step"] * section["num_generations_per_prompt"]
    for model in ("policy", "value") if setup.algorithm == "ppo" else ("policy",):
        key = f"{model}.train_global_batch_size"
        batch, micro = setup.get(key), setup.get(f"{model}.train_micro_batch_size")
        if rollouts % batch:
            yield Violation(
                key, batch, f"a divisor of the {rollouts} answers of a step (prompts x answers each)", BATCHES
            )
        ranks = setup.data_parallel if model == "policy" else setup.value_data_parallel
        if ranks and batch % (micro * ranks):
            product = f"train_micro_batch_size {micro} x {ranks} data-parallel ranks"
            yield Violation(key, batch, f"a multiple of {micro * ranks} ({product})", BATCHES)


def _critic_is_the_policys_model(setup: Setup) -> Found:
    """Made of one checkpoint, both read its configuration alike."""
    name, overrides = "value.model_name", "hf_config_overrides"
    if setup.algorithm != "ppo" or setup.get(name) != setup.get("policy.model_name"):
        return
    wanted, found = setup.get(f"policy.{overrides}"), setup.get(f"value.{overrides}")
    if wanted != found:
        limit = f"{as_yaml(wanted)}, as policy.{overrides}, or a {name} of its own"
        yield Violation(f"value.{overrides}", found, limit, f"{DOCUMENT}#{anchor_id(f'value.{overrides}')}")


def _lengths_fit(setup: Setup) -> Found:
    longest = setup.get("policy.max_total_sequence_length")
    engine = setup.get("policy.generation.vllm_cfg.max_model_len")
    if engine < longest:
        key = "policy.generation.vllm_cfg.max_model_len"
        yield Violation(key, engine, f"at least policy.max_total_sequence_length, {longest}", BATCHES)


def _leave_one_out_needs_company(setup: Setup) -> Found:
    if setup.algorithm != "grpo" or setup.get("grpo.num_generations_per_prompt") > 1:
        return
    if setup.get("grpo.adv_estimator.name") in ("grpo", "gdpo"):
        yield Violation(
            "grpo.num_generations_per_prompt", 1, "2 or more: one answer has no group to compare with", BATCHES
        )


def _asynchronous_options_agree(setup: Setup) -> Found:
    """Rollouts that are older than the policy need their importance weights."""
    key = "grpo.async_grpo.enabled"
    if setup.algorithm != "grpo" or not setup.get(key):
        return
    if not setup.get("loss_fn.use_importance_sampling_correction"):
        yield Violation(key, True, "false, or loss_fn.use_importance_sampling_correction: true", LOSS)
    if setup.get("loss_fn.force_on_policy_ratio"):
        yield Violation(key, True, "false, or loss_fn.force_on_policy_ratio: false", LOSS)
    if setup.get("grpo.use_dynamic_sampling"):
        yield Violation(key, True, "false, or grpo.use_dynamic_sampling: false", LOSS)


def _loss_options_agree(setup: Setup) -> Found:
    """The loss's own list, so that there is one source of what conflicts."""
    from refit_transport.rl.loss_config import LossConfig

    options: dict[str, Any] = dict(setup.get("loss_fn"))
    try:
        LossConfig(**options)
    except ValueError as error:
        for line in str(error).splitlines():
            key, _, words = line.partition(": ")
            yield Violation(key, setup.get(key), words, LOSS)


def _loop_options_agree(setup: Setup) -> Found:
    name = setup.algorithm
    loop, loss = setup.get(name), setup.get("loss_fn")
    estimator = loop["adv_estimator"]["name"]
    if loop.get("batch_multiplier", 1) != 1 and not loop["use_dynamic_sampling"]:
        yield Violation(f"{name}.batch_multiplier", loop["batch_multiplier"], "1 without use_dynamic_sampling", BATCHES)
    metric, threshold = loop["stop_at_validation_metric"], loop["stop_at_validation_threshold"]
    if (metric is None) != (threshold is None):
        key = "threshold" if threshold is None else "metric"
        yield Violation(f"{name}.stop_at_validation_{key}", None, "set, since its counterpart is", BATCHES)
    if loss["use_kl_in_reward"] and estimator not in ("reinforce_plus_plus", "gae"):
        words = f"false with adv_estimator.name {estimator}; reinforce_plus_plus and gae have token rewards"
        yield Violation("loss_fn.use_kl_in_reward", True, words, LOSS)
    if loss["reference_policy_kl_penalty"] and loop["skip_reference_policy_logprobs_calculation"]:
        words = f"false, or loss_fn.reference_policy_kl_penalty: 0 (found {loss['reference_policy_kl_penalty']:g})"
        yield Violation(f"{name}.skip_reference_policy_logprobs_calculation", True, words, LOSS)


def _scaling_has_a_range(setup: Setup) -> Found:
    prefix = f"{setup.algorithm}.reward_scaling"
    scaling = setup.get(prefix)
    if scaling["enabled"] and scaling["source_max"] <= scaling["source_min"]:
        words = f"above source_min, {scaling['source_min']:g}"
        yield Violation(f"{prefix}.source_max", scaling["source_max"], words, BATCHES)


def _save_deadline_is_a_time(setup: Setup) -> Found:
    key = "checkpointing.checkpoint_must_save_by"
    deadline = setup.get(key)
    if deadline is not None and not re.fullmatch(r"\d+(:\d\d){3}", deadline):
        yield Violation(key, deadline, "null or DD:HH:MM:SS", f"{DOCUMENT}#checkpointing")


def _data_is_there(setup: Setup) -> Found:
    anchor = f"{DOCUMENT}#data"
    for key in ("data.train_path", "data.val_path"):
        path = setup.get(key)
        if path and not Path(path).is_file():
            yield Violation(key, path, "an existing JSONL file", anchor)
    if setup.get("data.dataset_name") == "jsonl" and not setup.get("data.train_path"):
        yield Violation("data.train_path", None, "a JSONL file, since data.dataset_name is jsonl", anchor)


def _reward_can_be_imported(setup: Setup) -> Found:
    name = setup.get("env.reward")
    module, colon, function = name.partition(":")
    if name != "exact_match" and not (colon and function and _module_exists(module)):
        yield Violation(
            "env.reward", name, "exact_match, or module:function of a module that can be found", f"{DOCUMENT}#env"
        )


def _module_exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


_RULES: tuple[Callable[[Setup], Found], ...] = (
    _batches_divide,
    _critic_is_the_policys_model,
    _lengths_fit,
    _leave_one_out_needs_company,
    _asynchronous_options_agree,
    _loss_options_agree,
    _loop_options_agree,
    _scaling_has_a_range,
    _save_deadline_is_a_time,
    _data_is_there,
    _reward_can_be_imported,
)
