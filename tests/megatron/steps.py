"""The same log-probabilities and optimizer step from Megatron ranks and from one transformers model."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from refit_transport.layout.region import Region
from refit_transport.rl.batch import Batch, batch_sums, pad_sequences
from refit_transport.rl.loss_config import LossConfig
from refit_transport.rl.losses import ClippedPolicyLoss
from refit_transport.rl.policy.logprobs import token_logprobs
from refit_transport.rl.policy.megatron import MegatronPolicyWorker
from tests.megatron.cases import Case
from tests.megatron.latent_attention import plain_attention
from tests.models import VOCABULARY, read_checkpoint

ROWS = 5
# A large epsilon makes Adam's step nearly proportional to the gradient; else only its sign would be compared.
ADAM = {"lr": 0.1, "weight_decay": 0.0, "adam_eps": 1.0}
LOSS = ClippedPolicyLoss(LossConfig(reference_policy_kl_penalty=0.0))
Stored = list[tuple[str, tuple[int, ...], Region, torch.Tensor]]


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    prompts, answers = [draw(3 + i % 3) for i in range(ROWS)], [draw(2 + i % 4) for i in range(ROWS)]
    batch = pad_sequences(prompts, answers, [[-5.0] * len(a) for a in answers], 0)
    batch["prev_logprobs"] = batch["generation_logprobs"].clone()
    batch["advantages"] = torch.randn(ROWS, 1, generator=generator).expand_as(batch["token_mask"]).contiguous()
    batch["sample_mask"][1] = 0.0
    return batch


def policy_config(path: Path, cut: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    config = {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": 2,
        "max_grad_norm": 1.0,
        "megatron_cfg": {**cut, "optimizer": ADAM},
    }
    return config | overrides


def make_worker(rank: int, case: Case, path: Path, **overrides: Any) -> MegatronPolicyWorker:
    with plain_attention() if case.family == "deepseek_v3" else nullcontext():
        return MegatronPolicyWorker(rank, case.ranks, "", 0, policy_config(path, case.cut, **overrides))


def stored(worker: MegatronPolicyWorker) -> Stored:
    return [(h.name, h.shape, h.region, h.view.clone()) for h in worker.source().stored()]


@dataclass
class RankResult:
    speaks: bool
    logprobs: torch.Tensor
    holdings: dict[str, tuple[Region, ...]]
    loaded: Stored
    metrics: dict[str, float]
    stepped: Stored


def megatron_step(rank: int, case: Case, path: Path) -> RankResult:
    """Body of a Megatron rank."""
    worker = make_worker(rank, case, path)
    loaded, logprobs = stored(worker), worker.logprobs(make_batch())
    metrics = worker.train(make_batch(), LOSS)
    return RankResult(worker.tp_rank == 0, logprobs, dict(worker.source().holdings()), loaded, metrics, stored(worker))


@dataclass
class Expected:
    logprobs: torch.Tensor
    loss: float
    grad_norm: float
    stepped: dict[str, torch.Tensor]
    """By checkpoint name."""


def transformers_step(path: Path) -> Expected:
    """One process, one model, the whole batch at once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
    logprobs = token_logprobs(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])
    loss, _ = LOSS(logprobs, batch, batch_sums(batch))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    inside = torch.arange(logprobs.shape[1])[None] < batch["input_lengths"][:, None]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Expected(
            torch.where(inside, logprobs.detach(), 0.0), float(loss.detach()), float(norm), read_checkpoint(folder)
        )
