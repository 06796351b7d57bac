"""Stand-ins for policy, critic, engines and refit that answer from a script and record what they were asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from refit_transport.rl.assemble import grpo_loop, ppo_loop
from refit_transport.rl.batch import Batch, batch_sums
from refit_transport.rl.local import LocalRefitReport
from refit_transport.rl.loop import TrainingLoop
from refit_transport.rl.metrics import combine_parts
from refit_transport.rl.protocols import Completion, Loss, SamplingConfig
from refit_transport.rl.tasks.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


class Trace:
    """Calls in the order in which they came, by all stand-ins of one run."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batches: list[Batch] = []
        self.samplings: list[SamplingConfig] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.rows: list[Sequence[Mapping[str, Any]]] = []
        self.printed: list[Sequence[Mapping[str, Any]]] = []

    def refit_done(self, report: LocalRefitReport) -> None:
        self.calls.append("reported refit")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((step, dict(metrics)))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows.append(rows)

    def validation_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.printed.append(rows)


class ScriptedModel:
    """A policy and a critic: log-probabilities ``offset`` away from the engine's, values zero."""

    def __init__(self, trace: Trace, name: str, offset: float = 0.0) -> None:
        self._trace = trace
        self._name = name
        self._offset = offset

    def __getattr__(self, method: str) -> Callable[[], None]:
        if not method.startswith(("prepare_for_", "finish")):
            raise AttributeError(method)
        return lambda: self._trace.calls.append(f"{self._name}.{method}")

    def logprobs(self, batch: Batch) -> torch.Tensor:
        self._trace.calls.append(f"{self._name}.logprobs")
        return (batch["generation_logprobs"] - self._offset) * batch["token_mask"]

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        self._trace.calls.append(f"{self._name}.reference_logprobs")
        return batch["generation_logprobs"]

    def values(self, batch: Batch) -> torch.Tensor:
        self._trace.calls.append(f"{self._name}.values")
        return torch.zeros_like(batch["token_mask"])

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        self._trace.calls.append(f"{self._name}.train")
        self._trace.batches.append(dict(batch))
        _, metrics = loss(batch["generation_logprobs"], batch, batch_sums(batch))
        return combine_parts([metrics]) | {"grad_norm": 1.0}

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        (path / "extra.json").write_text(json.dumps(extra))

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        return json.loads((path / "extra.json").read_text())


Answer = Callable[[str, int], str]
"""Text to generate for a prompt's text and the sample's index in the call; ends in ``.`` where it does not stop."""


def correct_every_second_time(prompt: str, index: int) -> str:
    return prompt[:-1][::-1] if index % 2 else "000"


class ScriptedEngines:
    """Two engines and the refit that feeds them."""

    def __init__(self, trace: Trace, answer: Answer = correct_every_second_time) -> None:
        self._trace = trace
        self._answer = answer
        self.versions = [0, 0]
        self.arrives = True
        """Whether the second engine really takes a refit."""
        self.generates_with: int | None = None

    def refit(self, version: int) -> LocalRefitReport:
        self._trace.calls.append(f"refit {version}")
        self.versions = [version, version if self.arrives else self.versions[1]]
        return LocalRefitReport(version, 0.25, {"reshard": 600, "broadcast": 400}, {"exchange": 0.25}, "none")

    def weight_versions(self) -> list[int]:
        return self.versions

    def prepare_for_generation(self) -> None:
        self._trace.calls.append("wake")

    def finish_generation(self) -> None:
        self._trace.calls.append("sleep")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        self._trace.calls.append(f"generate {len(prompts)}")
        self._trace.samplings.append(sampling)
        return [self._complete(TOKENIZER.decode(list(prompt)), index) for index, prompt in enumerate(prompts)]

    def _complete(self, prompt: str, index: int) -> Completion:
        text = self._answer(prompt, index)
        ids = TOKENIZER(text, add_special_tokens=False).input_ids
        reason = "length" if text.endswith(".") else "stop"
        ids = ids if reason == "length" else [*ids, TOKENIZER.eos_token_id]
        version = self.versions[0] if self.generates_with is None else self.generates_with
        return Completion(ids, [-0.5] * len(ids), reason, (version,))


LOOP = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2, "val_period": 0}


def scripted_loop(
    folder: Path,
    algorithm: str = "grpo",
    answer: Answer = correct_every_second_time,
    offset: float = 0.0,
    loss: Mapping[str, Any] | None = None,
    checkpointing: Mapping[str, Any] | None = None,
    logger: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[TrainingLoop, SimpleNamespace]:
    """A loop over stand-ins, and the ``trace``, ``engines`` and ``policy`` behind it. ``options`` go to ``grpo.*`` or
    ``ppo.*``."""
    trace = Trace()
    engines = ScriptedEngines(trace, answer)
    policy = ScriptedModel(trace, "policy", offset)
    off = {"reward_shaping": {"enabled": False}, "reward_scaling": {"enabled": False}, "val_at_start": False}
    config = {
        algorithm: {**(off if algorithm == "ppo" else {}), **LOOP, **options},
        "loss_fn": {"reference_policy_kl_penalty": 0.0, **(loss or {})},
        "checkpointing": {"enabled": False, **(checkpointing or {})},
        "policy": {"generation": {"max_new_tokens": 4}},
        "logger": logger or {},
    }
    if algorithm == "grpo":
        loop = grpo_loop(config, policy, engines, engines, TOKENIZER, trace, folder)
    else:
        value = ScriptedModel(trace, "value")
        loop = ppo_loop(config, policy, value, engines, engines, TOKENIZER, trace, folder)
    return loop, SimpleNamespace(trace=trace, engines=engines, policy=policy)
