"""Validation: generate on held-out prompts with current weights, and decide whether that was good enough to stop."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.rl.collect import RolloutCollector
from refit_transport.rl.data import Example
from refit_transport.rl.protocols import Reporter
from refit_transport.rl.rollout import Group
from refit_transport.rl.settings import LoopSettings

SOLVED = 1.0
"""Reward from which a completion counts as correct in pass@k."""


@dataclass(frozen=True)
class Validator:
    settings: LoopSettings
    examples: list[Example]
    collector: RolloutCollector
    reporter: Reporter
    samples_to_print: int = 0

    def due(self, step: int, last: bool) -> bool:
        """``step`` counts completed steps."""
        if not self.examples:
            return False
        if last and self.settings.val_at_end:
            return True
        period = self.settings.val_period
        return period > 0 and step % period == 0 and step >= self.settings.val_start_at

    def run(self) -> dict[str, float]:
        """Metrics without prefix. Refits first when the engines are stale."""
        with self.collector.engines_to_itself("idle/validation"):
            groups = self._generate()
        if self.samples_to_print:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            self.reporter.validation_samples([rollout.row() for rollout in rollouts[: self.samples_to_print]])
        return validation_metrics(groups)

    def _generate(self) -> list[Group]:
        collector = self.collector
        collector.freshness.prepare_generation()
        chosen = self.examples[: self.settings.max_val_samples]
        samples, size = self.settings.val_num_generations_per_prompt, self.settings.val_batch_size
        groups: list[Group] = []
        for start in range(0, len(chosen), size):
            sampling = collector.sampling.validation(self.settings.seed + start * samples)
            groups += collector.roll_out(chosen[start : start + size], samples, sampling, collector.timer)
        collector.generation.finish_generation()
        return groups

    def satisfied(self, metrics: dict[str, float]) -> bool:
        """Whether ``stop_at_validation_metric`` has reached its threshold. Raises KeyError for a metric that validation
        does not give."""
        name = self.settings.stop_at_validation_metric
        if name is None:
            return False
        name = name.removeprefix("val:")
        if name not in metrics:
            raise KeyError(f"stop_at_validation_metric: got {name!r}, allowed {sorted(metrics)}")
        return metrics[name] >= self.settings.stop_at_validation_threshold


def validation_metrics(groups: list[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {
        "accuracy": sum(rollout.reward for rollout in rollouts) / len(rollouts),
        "avg_length": sum(rollout.length for rollout in rollouts) / len(rollouts),
        "num_samples": float(len(rollouts)),
    }
    samples = len(groups[0].rollouts)
    if samples > 1:
        solved = sum(any(rollout.reward >= SOLVED for rollout in group.rollouts) for group in groups)
        metrics[f"pass@{samples}"] = solved / len(groups)
    return metrics
