"""One step's rollouts: prompts repeated per group, generated, decoded, rewarded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refit_transport.rl.batch import Batch, pad_sequences
from refit_transport.rl.data import Example, Reward
from refit_transport.rl.protocols import Completion, Generation, SamplingConfig


@dataclass(frozen=True)
class Rollout:
    """One sample."""

    example: Example
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    reward: float
    """As the task gave it; the sum where the task gives components."""
    components: Mapping[str, float]

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"

    @property
    def length(self) -> int:
        return len(self.completion.token_ids)

    def row(self) -> dict[str, Any]:
        """What the rollout log keeps of it."""
        return {
            "prompt": self.example.prompt,
            "answer": self.example.answer,
            "completion": self.text,
            "reward": self.reward,
            "tokens": self.length,
            "finish_reason": self.completion.finish_reason,
        }


@dataclass(frozen=True)
class Group:
    """All samples of one prompt."""

    rollouts: tuple[Rollout, ...]

    @property
    def has_signal(self) -> bool:
        """Whether the task's rewards differ, so that the group's advantages are not all zero."""
        return any(rollout.reward != self.rollouts[0].reward for rollout in self.rollouts)


def generate_completions(
    prompts: Sequence[Sequence[int]], samples_per_prompt: int, generation: Generation, sampling: SamplingConfig
) -> list[Completion]:
    """``samples_per_prompt`` completions per prompt, those of one prompt adjacent. Raises RuntimeError when the engines
    return another number."""
    repeated = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    completions = generation.generate(repeated, sampling)
    if len(completions) != len(repeated):
        raise RuntimeError(f"generate: got {len(completions)} completions for {len(repeated)} prompts")
    return completions


def reward_groups(
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    decode: Callable[[Sequence[int]], str],
    reward: Reward,
) -> list[Group]:
    """One group per example; ``completions`` holds equally many for each, adjacent."""
    size = len(completions) // len(examples)
    groups = []
    for index, (example, prompt) in enumerate(zip(examples, prompts, strict=True)):
        own = completions[index * size : (index + 1) * size]
        groups.append(Group(tuple(_rewarded(example, tuple(prompt), one, decode, reward) for one in own)))
    return groups


def _rewarded(
    example: Example,
    prompt_ids: tuple[int, ...],
    completion: Completion,
    decode: Callable[[Sequence[int]], str],
    reward: Reward,
) -> Rollout:
    text = decode(completion.token_ids)
    given = reward(example, text)
    components = dict(given) if isinstance(given, Mapping) else {"reward": float(given)}
    return Rollout(example, prompt_ids, completion, text, float(sum(components.values())), components)


@dataclass(frozen=True)
class StepRollouts:
    """The samples of one training step, groups adjacent."""

    groups: tuple[Group, ...]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    def group_ids(self) -> torch.Tensor:
        """[B] int64: 0, 0, ..., 1, 1, ..."""
        return torch.tensor([i for i, group in enumerate(self.groups) for _ in group.rollouts])

    def task_rewards(self) -> torch.Tensor:
        return torch.tensor([rollout.reward for rollout in self.rollouts])

    def lengths(self) -> torch.Tensor:
        return torch.tensor([rollout.length for rollout in self.rollouts])

    def truncated(self) -> torch.Tensor:
        return torch.tensor([rollout.truncated for rollout in self.rollouts])

    def components(self) -> dict[str, torch.Tensor]:
        """[B] per named component; raises ValueError when samples disagree about the names."""
        names = set(self.rollouts[0].components)
        for rollout in self.rollouts:
            if set(rollout.components) != names:
                raise ValueError(
                    f"reward components differ between samples: {sorted(names)} and {sorted(rollout.components)}"
                )
        return {name: torch.tensor([r.components[name] for r in self.rollouts]) for name in sorted(names)}

    def batch(self, pad_token_id: int, length_multiple: int) -> Batch:
        rollouts = self.rollouts
        return pad_sequences(
            [rollout.prompt_ids for rollout in rollouts],
            [rollout.completion.token_ids for rollout in rollouts],
            [rollout.completion.logprobs for rollout in rollouts],
            pad_token_id,
            length_multiple,
        )

    def metrics(self) -> dict[str, float]:
        rollouts, lengths = self.rollouts, self.lengths().float()
        prompt_lengths = [len(rollout.prompt_ids) for rollout in rollouts]
        return {
            "reward": float(self.task_rewards().mean()),
            "mean_prompt_length": sum(prompt_lengths) / len(rollouts),
            "total_num_tokens": sum(prompt_lengths) + float(lengths.sum()),
            "mean_gen_tokens_per_sample": float(lengths.mean()),
            "max_gen_tokens_per_sample": float(lengths.max()),
            "truncation_rate": float(self.truncated().float().mean()),
        }
