"""Builds a training loop from a configuration tree and the pieces that a cluster (or a test) provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from refit_transport.rl.ahead import AheadCollector
from refit_transport.rl.checkpoints import CheckpointStore
from refit_transport.rl.collect import RolloutCollector
from refit_transport.rl.data import Dataloader, PromptEncoder
from refit_transport.rl.freshness import WeightFreshness
from refit_transport.rl.grpo import GrpoUpdate
from refit_transport.rl.loop import TrainingLoop, Update
from refit_transport.rl.loss_config import LossConfig, ValueLossConfig
from refit_transport.rl.ppo import PpoUpdate
from refit_transport.rl.protocols import Generation, Policy, Refit, Reporter, Value
from refit_transport.rl.rewards import warn_about_ignored_keys
from refit_transport.rl.settings import (
    CheckpointSettings,
    DataSettings,
    EnvSettings,
    GenerationSettings,
    GrpoSettings,
    LoopSettings,
    PpoSettings,
    check_combination,
    read,
)
from refit_transport.rl.tasks.registry import load_task
from refit_transport.rl.timing import StepTimer
from refit_transport.rl.validation import Validator

Tree = Mapping[str, Any]


def grpo_loop(
    config: Tree,
    policy: Policy,
    generation: Generation,
    refit: Refit,
    tokenizer: Any,
    reporter: Reporter,
    folder: Path,
) -> TrainingLoop:
    """A GRPO run. ``config`` is the resolved tree as plain containers (``OmegaConf.to_container``); ``folder`` the
    run's. Raises ValueError for options that contradict each other."""
    timer = StepTimer()
    settings = read(GrpoSettings, _with_response_length(config, "grpo"))
    loss = read(LossConfig, config.get("loss_fn"))
    check_combination(settings, loss)
    update = GrpoUpdate(policy, settings, loss, timer)
    return _loop(config, settings, update, generation, refit, tokenizer, reporter, folder, timer)


def ppo_loop(
    config: Tree,
    policy: Policy,
    value: Value,
    generation: Generation,
    refit: Refit,
    tokenizer: Any,
    reporter: Reporter,
    folder: Path,
) -> TrainingLoop:
    """A PPO run; as ``grpo_loop``, with a critic."""
    timer = StepTimer()
    settings = read(PpoSettings, _with_response_length(config, "ppo"))
    loss, value_loss = read(LossConfig, config.get("loss_fn")), read(ValueLossConfig, config.get("value_loss_fn"))
    check_combination(settings, loss)
    update = PpoUpdate(policy, value, settings, loss, value_loss, timer)
    return _loop(config, settings, update, generation, refit, tokenizer, reporter, folder, timer)


def _with_response_length(config: Tree, section: str) -> dict[str, Any]:
    """The section, with ``reward_shaping.max_response_length`` defaulting to the longest sequence."""
    chosen = dict(config.get(section) or {})
    shaping = dict(chosen.get("reward_shaping") or {})
    if shaping.get("enabled") and shaping.get("max_response_length") is None:
        shaping["max_response_length"] = config.get("policy", {}).get("max_total_sequence_length", 512)
    return {**chosen, "reward_shaping": shaping}


def _collector_type(settings: LoopSettings) -> Callable[..., RolloutCollector]:
    if isinstance(settings, GrpoSettings) and settings.async_grpo.enabled:
        return partial(AheadCollector, max_age=settings.async_grpo.max_trajectory_age_steps)
    return RolloutCollector


def _loop(
    config: Tree,
    settings: LoopSettings,
    update: Update,
    generation: Generation,
    refit: Refit,
    tokenizer: Any,
    reporter: Reporter,
    folder: Path,
    timer: StepTimer,
) -> TrainingLoop:
    policy_section = config.get("policy") or {}
    data = read(DataSettings, config.get("data"))
    checkpointing = read(CheckpointSettings, config.get("checkpointing"))
    task = load_task(data, read(EnvSettings, config.get("env")))
    warn_about_ignored_keys(settings.reward_shaping)
    encoder = PromptEncoder(tokenizer, data.max_input_seq_length)
    freshness = WeightFreshness(refit, generation, reporter, timer)
    collector = _collector_type(settings)(
        settings=settings,
        sampling=read(GenerationSettings, policy_section.get("generation")),
        dataloader=Dataloader(task.train, settings.seed, data.shuffle),
        encoder=encoder,
        reward=task.reward,
        generation=generation,
        freshness=freshness,
        timer=timer,
    )
    printed = (config.get("logger") or {}).get("num_val_samples_to_print") or 0
    directory = Path(checkpointing.checkpoint_dir) if checkpointing.checkpoint_dir else folder / "checkpoints"
    return TrainingLoop(
        settings=settings,
        checkpointing=checkpointing,
        store=CheckpointStore(directory, checkpointing),
        collector=collector,
        validator=Validator(settings, task.validation, collector, reporter, printed),
        freshness=freshness,
        update=update,
        reporter=reporter,
        timer=timer,
        pad_token_id=encoder.pad_token_id,
        length_multiple=policy_section.get("make_sequence_length_divisible_by") or 1,
    )


def violations(config: Tree, algorithm: str) -> list[str]:
    """Rules across options that a run of ``algorithm`` (``grpo`` or ``ppo``) would trip over, a line each:
    contradicting options, missing data files, rewards that cannot be imported. Starts nothing."""
    kind = {"grpo": GrpoSettings, "ppo": PpoSettings}[algorithm]
    checks: tuple[Callable[[], Any], ...] = (
        lambda: read(kind, _with_response_length(config, algorithm)),
        lambda: read(LossConfig, config.get("loss_fn")),
        lambda: read(ValueLossConfig, config.get("value_loss_fn")),
        lambda: load_task(read(DataSettings, config.get("data")), read(EnvSettings, config.get("env"))),
        lambda: check_combination(
            read(kind, _with_response_length(config, algorithm)), read(LossConfig, config.get("loss_fn"))
        ),
    )
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ValueError as error:
            found |= dict.fromkeys(str(error).splitlines())
    return list(found)
