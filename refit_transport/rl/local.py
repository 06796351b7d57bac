"""Policy, critic, generation and refit in one process, on a plain Hugging Face model.

For trying an algorithm without a cluster, and as the loops' test bench. Generation samples from a copy of the model, so
that it sees an update only through a refit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from refit_transport.rl.batch import Batch, batch_sums, select_rows
from refit_transport.rl.metrics import average_updates, combine_parts
from refit_transport.rl.protocols import Completion, Loss, SamplingConfig

CHECKPOINT = "local.pt"


class LocalTrainer:
    """Optimizer steps over a module, with linear warm-up and decay of the learning rate."""

    def __init__(
        self,
        module: nn.Module,
        lr: float,
        global_batch_size: int,
        micro_batch_size: int,
        total_steps: int,
        warmup_steps: int = 10,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.module = module
        self._sizes = global_batch_size, micro_batch_size
        self._max_grad_norm = max_grad_norm
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: min(1.0, (step + 1) / max(1, warmup_steps)) * max(0.1, 1 - 0.9 * step / total_steps),
        )

    def prepare_for_training(self) -> None:
        self.module.train()

    def finish_training(self) -> None:
        self.module.eval()

    def predict(self, batch: Batch) -> torch.Tensor:
        """[B, S] float32, aligned with ``input_ids``."""
        raise NotImplementedError

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        lr = self._optimizer.param_groups[0]["lr"]
        size = self._sizes[0]
        starts = range(0, len(batch["input_ids"]), size)
        updates = [self._update(select_rows(batch, slice(start, start + size)), loss) for start in starts]
        self._schedule.step()
        return average_updates(updates) | {"lr": lr, "wd": 0.0}

    def _update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        sums, size = batch_sums(batch), self._sizes[1]
        parts = []
        for start in range(0, len(batch["input_ids"]), size):
            micro = select_rows(batch, slice(start, start + size))
            value, metrics = loss(self.predict(micro), micro, sums)
            value.backward()
            parts.append(metrics)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return combine_parts(parts) | {"grad_norm": float(norm)}

    def save_checkpoint(self, path: Path, extra: Mapping[str, Any]) -> None:
        state = {part: getattr(self, part).state_dict() for part in ("module", "_optimizer", "_schedule")}
        torch.save({**state, "extra": dict(extra)}, path / CHECKPOINT)

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        saved = torch.load(path / CHECKPOINT, weights_only=True)
        for part in ("module", "_optimizer", "_schedule"):
            getattr(self, part).load_state_dict(saved[part])
        return saved["extra"]


def token_logprobs(model: PreTrainedModel, input_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[B, S] float32 log-probabilities of ``input_ids``, column 0 zero. Right padding needs no attention mask: causal
    attention keeps it from the tokens before it."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(input_ids), 1), chosen], dim=1)


class LocalPolicy(LocalTrainer):
    """``Policy`` over a causal language model."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(model, **options)
        self._temperature = temperature
        self._reference = copy.deepcopy(model).eval()

    def prepare_for_logprobs(self) -> None:
        self.module.eval()

    def predict(self, batch: Batch) -> torch.Tensor:
        return token_logprobs(self.module, batch["input_ids"], self._temperature)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        return self.predict(batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        return token_logprobs(self._reference, batch["input_ids"], self._temperature)


class ValueModel(nn.Module):
    """A language model's last hidden state and a linear head that starts at zero."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = model.base_model
        self.head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, S]: the value of the state before token t, so column 0 is zero."""
        hidden = self.body(input_ids=input_ids, use_cache=False).last_hidden_state
        values = self.head(hidden)[..., 0].float()
        return torch.cat([torch.zeros(len(input_ids), 1), values[:, :-1]], dim=1)


class LocalValue(LocalTrainer):
    """``Value`` over a copy of a language model."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(ValueModel(copy.deepcopy(model)), **options)

    def prepare_for_inference(self) -> None:
        self.module.eval()

    def finish(self) -> None:
        self.finish_training()

    def predict(self, batch: Batch) -> torch.Tensor:
        return self.module(batch["input_ids"])

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        return self.predict(batch)


class LocalGeneration:
    """``Generation`` by plain sampling with a key-value cache from a copy of the policy's model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model).eval()
        self.version = 0

    def prepare_for_generation(self) -> None:
        self.model.eval()

    def finish_generation(self) -> None:
        """Nothing sleeps here."""

    def weight_versions(self) -> list[int]:
        return [self.version]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Completion]:
        """Prompts of equal length are sampled together. Raises ValueError for sampling options it does not have."""
        if sampling.top_p != 1.0 or sampling.top_k is not None or sampling.stop_strings:
            raise ValueError(f"local generation: top_p, top_k and stop_strings are not supported, got {sampling}")
        generator = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        completions: dict[int, Completion] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            sampled = self._sample(torch.tensor([list(prompts[row]) for row in rows]), sampling, generator)
            completions.update(zip(rows, sampled, strict=True))
        return [completions[row] for row in range(len(prompts))]

    @torch.no_grad()
    def _sample(
        self, prompts: torch.Tensor, sampling: SamplingConfig, generator: torch.Generator | None
    ) -> list[Completion]:
        stops = torch.tensor([self.model.config.eos_token_id, *sampling.stop_token_ids])
        tokens, logprobs = [], []
        current, cache = prompts, None
        finished = torch.zeros(len(prompts), dtype=torch.bool)
        while len(tokens) < sampling.max_new_tokens and not finished.all():
            output = self.model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            chosen, logprob = _choose(output.logits[:, -1].float(), sampling.temperature, generator)
            tokens.append(chosen)
            logprobs.append(logprob)
            finished = finished | torch.isin(chosen, stops)
            current = chosen[:, None]
        pairs = zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        return [self._completion(row, row_logprobs, set(stops.tolist())) for row, row_logprobs in pairs]

    def _completion(self, tokens: list[int], logprobs: list[float], stops: set[int]) -> Completion:
        """Cut after the first stop token."""
        end = next((index + 1 for index, token in enumerate(tokens) if token in stops), None)
        reason = "length" if end is None else "stop"
        return Completion(tuple(tokens[:end]), tuple(logprobs[:end]), reason, (self.version,))


def _choose(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] and their log-probabilities [B]; greedy at temperature 0."""
    logprobs = (logits / temperature if temperature > 0 else logits).log_softmax(-1)
    if temperature > 0:
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
    else:
        chosen = logprobs.argmax(-1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]


@dataclass(frozen=True)
class LocalRefitReport:
    """A ``RefitReport``."""

    version: int
    seconds: float
    bytes_by_path: Mapping[str, int]
    phases: Mapping[str, float]
    wire: str


class LocalRefit:
    """``Refit`` by copying every parameter and buffer."""

    def __init__(self, model: PreTrainedModel, generation: LocalGeneration) -> None:
        self._model = model
        self._generation = generation

    def refit(self, version: int) -> LocalRefitReport:
        start = time.perf_counter()
        state = self._model.state_dict()
        self._generation.model.load_state_dict(state)
        self._generation.version = version
        moved = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        seconds = time.perf_counter() - start
        return LocalRefitReport(version, seconds, {"reshard": 0, "broadcast": moved}, {"copy": seconds}, "memory")
