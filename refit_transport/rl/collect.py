"""Steps 1 to 6 of a training step: draw prompts, bring the engines up to date, generate, reward, fill the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from refit_transport.rl.data import Dataloader, Example, PromptEncoder, Reward
from refit_transport.rl.dynamic_sampling import DynamicSampler
from refit_transport.rl.freshness import WeightFreshness
from refit_transport.rl.protocols import Generation, SamplingConfig
from refit_transport.rl.rollout import Group, StepRollouts, generate_completions, reward_groups
from refit_transport.rl.settings import GenerationSettings, LoopSettings
from refit_transport.rl.timing import StepTimer

SEEDS_PER_STEP = 1 << 24


@dataclass
class RolloutCollector:
    settings: LoopSettings
    sampling: GenerationSettings
    dataloader: Dataloader
    encoder: PromptEncoder
    reward: Reward
    generation: Generation
    freshness: WeightFreshness
    timer: StepTimer
    consumed_samples: int = 0
    """Prompts drawn."""

    def state(self) -> dict[str, Any]:
        """Where the next step's prompts begin."""
        return {"consumed_samples": self.consumed_samples, "dataloader": self.dataloader.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.consumed_samples = state["consumed_samples"]
        self.dataloader.restore(state["dataloader"])

    def epochs_done(self) -> int:
        return self.dataloader.epoch

    @contextmanager
    def engines_to_itself(self, waiting: str = "") -> Iterator[None]:
        """Nothing else generates inside this context. ``waiting`` names the phase of a wait for it."""
        yield

    def close(self) -> None:
        """Ends what runs in the background."""

    def collect(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """Rollouts of one step with current weights, and metrics of how they came about."""
        self.freshness.prepare_generation()
        if self.settings.use_dynamic_sampling:
            groups, metrics = self._collect_dynamically(step)
        else:
            groups, metrics = tuple(self._draw_groups(self.settings.num_prompts_per_step, step, 0, self.timer)), {}
        self.generation.finish_generation()
        return StepRollouts(groups), metrics

    def _collect_dynamically(self, step: int) -> tuple[tuple[Group, ...], dict[str, float]]:
        prompts = math.ceil(self.settings.num_prompts_per_step * self.settings.batch_multiplier)
        sampler = DynamicSampler(self.settings.num_prompts_per_step, self.settings.dynamic_sampling_max_gen_batches)
        with self.timer.phase("dynamic_sampling"):
            while not sampler.full:
                sampler.add(self._draw_groups(prompts, step, sampler.generated, self.timer))
        return sampler.take(), sampler.metrics()

    def _draw_groups(self, count: int, step: int, already_generated: int, timer: StepTimer) -> list[Group]:
        with timer.phase("data_processing"):
            examples = self.dataloader.draw(count)
            self.consumed_samples += count
        samples = self.settings.num_generations_per_prompt
        return self.roll_out(examples, samples, self._sampling(step, already_generated * samples), timer)

    def _sampling(self, step: int, offset: int) -> SamplingConfig:
        """Every sample of a run has a seed of its own, which a resumed run repeats."""
        return self.sampling.training((self.settings.seed * 1_000_003 + step) * SEEDS_PER_STEP + offset)

    def roll_out(
        self, examples: Sequence[Example], samples: int, sampling: SamplingConfig, timer: StepTimer
    ) -> list[Group]:
        """Generates and rewards; every completion must come from the weights of the last refit."""
        with timer.phase("generation"):
            prompts = [self.encoder.encode(example.prompt) for example in examples]
            completions = generate_completions(prompts, samples, self.generation, sampling)
            self.freshness.check_completions(completions)
        with timer.phase("reward_calculation"):
            return reward_groups(
                examples,
                prompts,
                completions,
                lambda ids: self.encoder.decode(ids, sampling.stop_token_ids),
                self.reward,
            )
