"""Steps 1 to 6 of a training step: draw prompts, bring the engines up to date, generate, reward, fill the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

    def collect(self, step: int) -> tuple[StepRollouts, dict[str, float]]:
        """Rollouts of one step with current weights, and the metrics of dynamic sampling."""
        self.freshness.prepare_generation()
        if self.settings.use_dynamic_sampling:
            groups, metrics = self._collect_dynamically(step)
        else:
            groups, metrics = tuple(self._draw_groups(self.settings.num_prompts_per_step, step, 0)), {}
        self.generation.finish_generation()
        return StepRollouts(groups), metrics

    def _collect_dynamically(self, step: int) -> tuple[tuple[Group, ...], dict[str, float]]:
        prompts = math.ceil(self.settings.num_prompts_per_step * self.settings.batch_multiplier)
        sampler = DynamicSampler(self.settings.num_prompts_per_step, self.settings.dynamic_sampling_max_gen_batches)
        with self.timer.phase("dynamic_sampling"):
            while not sampler.full:
                sampler.add(self._draw_groups(prompts, step, sampler.generated))
        return sampler.take(), sampler.metrics()

    def _draw_groups(self, count: int, step: int, already_generated: int) -> list[Group]:
        with self.timer.phase("data_processing"):
            examples = self.dataloader.draw(count)
            self.consumed_samples += count
        samples = self.settings.num_generations_per_prompt
        return self.roll_out(examples, samples, self._sampling(step, already_generated * samples))

    def _sampling(self, step: int, offset: int) -> SamplingConfig:
        """Every sample of a run has a seed of its own, which a resumed run repeats."""
        return self.sampling.training((self.settings.seed * 1_000_003 + step) * SEEDS_PER_STEP + offset)

    def roll_out(self, examples: Sequence[Example], samples: int, sampling: SamplingConfig) -> list[Group]:
        """Generates and rewards; every completion must come from the trainer's current weights."""
        with self.timer.phase("generation"):
            prompts = [self.encoder.encode(example.prompt) for example in examples]
            completions = generate_completions(prompts, samples, self.generation, sampling)
            self.freshness.check_completions(completions)
        with self.timer.phase("reward_calculation"):
            return reward_groups(
                examples,
                prompts,
                completions,
                lambda ids: self.encoder.decode(ids, sampling.stop_token_ids),
                self.reward,
            )
