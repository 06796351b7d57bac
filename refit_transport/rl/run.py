"""A whole run: loop, report and summary, from a configuration and the pieces that a cluster provides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from refit_transport.report.run_report import RunReport
from refit_transport.report.summary import RunSummary
from refit_transport.rl.assemble import Tree, grpo_loop, ppo_loop
from refit_transport.rl.loop import TrainingLoop
from refit_transport.rl.protocols import Generation, Policy, Refit, Reporter, Value


def run(
    config: Tree,
    config_yaml: str,
    folder: Path,
    policy: Policy,
    generation: Generation,
    refit: Refit,
    tokenizer: Any,
    value: Value | None = None,
    console: Console | None = None,
) -> RunSummary:
    """Trains and reports into ``folder``: PPO with a ``value`` model, GRPO without. ``config`` is the resolved tree as
    plain containers, ``config_yaml`` its text for ``config.yaml``. Continues from the folder's newest checkpoint."""
    logger = config.get("logger") or {}
    live = None if logger.get("progress", True) else False
    with RunReport(folder, config_yaml, console, logger.get("tensorboard_enabled", True), live) as report:
        loop = _loop(config, folder, policy, generation, refit, tokenizer, value, report)
        report.start(loop.total_steps)
        result = loop.run()
        return report.finish(result.weight_version, result.stopped_by, logger.get("plots", True))


def _loop(
    config: Tree,
    folder: Path,
    policy: Policy,
    generation: Generation,
    refit: Refit,
    tokenizer: Any,
    value: Value | None,
    reporter: Reporter,
) -> TrainingLoop:
    if value is None:
        return grpo_loop(config, policy, generation, refit, tokenizer, reporter, folder)
    return ppo_loop(config, policy, value, generation, refit, tokenizer, reporter, folder)
