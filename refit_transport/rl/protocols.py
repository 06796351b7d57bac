"""What the RL loops drive: a policy, a generation fleet, a refit between both, and a critic for PPO.

The loops hold only these interfaces. ``rl/local.py`` implements them in one process, the cluster room over Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from refit_transport.rl.batch import Batch

Loss = Callable[[torch.Tensor, Batch, Mapping[str, float]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""``loss(predictions [B, S], batch, sums) -> (scalar, metrics)``; picklable. ``sums`` are the global batch's
``batch_sums``; contributions are added over micro-batches and data-parallel ranks (``rl/metrics.py``)."""


@dataclass(frozen=True)
class SamplingConfig:
    """How one call of ``generate`` samples."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    """Prompt i of the call is sampled with seed ``seed + i``; None leaves it to the engine."""


@dataclass(frozen=True)
class Completion:
    """What an engine generated for one prompt."""

    token_ids: Sequence[int]
    """Includes the stop token, if one was generated."""
    logprobs: Sequence[float]
    """Of each generated token, under the distribution it was sampled from."""
    finish_reason: str
    """``stop`` or ``length``."""
    weight_versions: tuple[int, ...]
    """Every weight version that took part, ascending; one unless a refit happened during the generation."""


class RefitReport(Protocol):
    """What one refit moved, and how long it took."""

    @property
    def version(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bytes_by_path(self) -> Mapping[str, int]:
        """Bytes that inference ranks received, by ``reshard`` and ``broadcast``."""

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds by phase; phases may overlap."""

    @property
    def wire(self) -> str: ...


class Policy(Protocol):
    """The trainer's ranks as one object. Batches arrive whole; the implementation shards them over its ranks."""

    def prepare_for_logprobs(self) -> None:
        """Called before a log-probability pass (loads weights where they were offloaded)."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """[B, S] float32 log-probabilities of ``input_ids`` under the current weights and the sampling temperature,
        aligned with ``input_ids``; column 0 is zero."""

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """The same under the frozen initial weights."""

    def prepare_for_training(self) -> None: ...

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step per ``train_global_batch_size`` samples, in order. Returns the loss's metrics
        (``combine_parts`` then ``average_updates``) and ``grad_norm``, ``lr``, ``wd``."""

    def finish_training(self) -> None:
        """Called after training, before generation or another model uses the devices."""

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Model, optimizer and scheduler under ``path`` (which exists), with ``extra`` (JSON values)."""

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restores what ``save_checkpoint`` wrote, and returns ``extra``."""


class Value(Protocol):
    """The critic of PPO, with the policy's life cycle. It may share the policy's devices: the loop calls ``finish`` of
    one before it prepares the other."""

    def prepare_for_inference(self) -> None: ...

    def values(self, batch: Batch) -> torch.Tensor:
        """[B, S] float32: value of the state in which token t is generated, aligned with ``input_ids``."""

    def prepare_for_training(self) -> None: ...

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]: ...

    def finish(self) -> None: ...

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None: ...

    def load_checkpoint(self, path: Path) -> dict[str, Any]: ...


class Generation(Protocol):
    """The inference engines as one object."""

    def prepare_for_generation(self) -> None:
        """Wakes the engines; called after a refit or instead of one."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        """One completion per prompt, in order. Equal prompts are sampled independently."""

    def finish_generation(self) -> None:
        """Lets the engines sleep where they share devices with the trainer."""

    def weight_versions(self) -> list[int]:
        """The version each engine says it serves, in the order of the engines."""


class Refit(Protocol):
    """Moves the policy's weights into every engine."""

    def refit(self, version: int) -> RefitReport:
        """Returns when every engine serves ``version``; raises when one does not."""


class Reporter(Protocol):
    """Where a loop reports; see ``report/``."""

    def refit_done(self, report: RefitReport) -> None: ...

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """``step`` counts from 1. Metric names are prefixed ``train/``, ``timing/train/`` or ``validation/``."""

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """One row per sample of the step."""

    def validation_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The first ``logger.num_val_samples_to_print`` samples of a validation; not called when that is 0."""
