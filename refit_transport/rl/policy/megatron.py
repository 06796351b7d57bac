"""One Megatron-core trainer rank: the policy worker's methods over a tensor-, pipeline- and expert-parallel model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from refit_transport.rl.batch import Batch, batch_sums, round_up, select_rows
from refit_transport.rl.metrics import average_updates, combine_parts
from refit_transport.rl.policy import megatron_checkpoint
from refit_transport.rl.policy.megatron_cpu import on_cpu
from refit_transport.rl.policy.megatron_logprobs import prediction_loss, vocabulary_logprobs
from refit_transport.rl.policy.megatron_model import build_chunks, initialize_groups
from refit_transport.rl.policy.megatron_optimizer import LearningRate, build_optimizer, data_parallel
from refit_transport.rl.policy.micro_batches import Loss, micro_batch_rows, rank_rows, step_rows, take_rows
from refit_transport.rl.policy.parallel import DTYPES
from refit_transport.rl.policy.world import TrainerWorld
from refit_transport.trainers.dtensor_load import CheckpointFiles
from refit_transport.trainers.megatron import MegatronSource
from refit_transport.trainers.megatron.load import load_checkpoint


class MegatronPolicyWorker:
    """The trained policy on one rank. ``config`` is the ``policy.*`` sub-tree as a plain dict.

    As with ``PolicyWorker``, every rank of the world makes one and then calls the same methods in the same order with
    the same whole batches. Megatron's own schedules run the micro-batches.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        config: Mapping[str, Any],
        timeout_s: float = 600.0,
    ) -> None:
        if find_spec("megatron") is None:
            raise RuntimeError(
                "policy.megatron_cfg.enabled: megatron-core is not installed; pip install 'refit-transport[megatron]'"
            )
        self.config, self.rank = config, rank
        self.settings: Mapping[str, Any] = config["megatron_cfg"]
        self._world = TrainerWorld.join(rank, world_size, master_addr, master_port, timeout_s)
        self.device = self._world.device
        self._reference: list[torch.Tensor] | None = None
        self._check()
        with self._megatron():
            self._find_place()
            self._build()

    def _check(self) -> None:
        if self.config.get("precision") == "float16":
            raise ValueError("policy.precision: got float16 with the Megatron trainer, allowed float32, bfloat16")

    def _find_place(self) -> None:
        """Joins Megatron's process groups, and reads this rank's place in them."""
        from megatron.core import parallel_state as groups

        initialize_groups(self.settings)
        self.dp_rank: int = groups.get_data_parallel_rank()
        self._dp_size: int = groups.get_data_parallel_world_size()
        self._tp_size: int = groups.get_tensor_model_parallel_world_size()
        self._stages: int = groups.get_pipeline_model_parallel_world_size()
        behind = self._stages - 1 - groups.get_pipeline_model_parallel_rank()
        self.tp_rank: int = behind * self._tp_size + groups.get_tensor_model_parallel_rank()
        """0 on the one rank of a model replica whose outputs count: the first of the last pipeline stage."""

    def _build(self) -> None:
        """Model, weights and optimizer."""
        self._facts = _checkpoint_facts(self.config)
        longest = int(self.config.get("max_total_sequence_length") or 512)
        bare = build_chunks(self._facts, self.settings, DTYPES[self.config.get("precision") or "float32"], longest)
        for parameter in (p for chunk in bare for p in chunk.parameters()):
            parameter.data.zero_()  # the rows that pad the vocabulary are in no checkpoint
        self.chunks: list[nn.Module] = data_parallel(bare, self.settings)
        self._source = MegatronSource(self.chunks, self._facts)
        load_checkpoint(self._source, CheckpointFiles(self.config["model_name"]))
        self.optimizer = build_optimizer(self.chunks, self.settings, self.config.get("max_grad_norm"))
        self.optimizer.reload_model_params()
        self._rate = LearningRate(self.optimizer, self.config.get("scheduler"))

    def _megatron(self) -> AbstractContextManager[None]:
        return on_cpu() if self.device.type == "cpu" else nullcontext()

    def rows(self, count: int) -> range:
        """Which of ``count`` rows this rank computes; ranks that differ only in ``tp_rank`` compute the same."""
        return rank_rows(range(count), self.dp_rank, self._dp_size)

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Float32 [len(rows), s] on CPU: log-probabilities of this rank's rows under the current weights, zero at
        padding. Meaningful where ``tp_rank`` is 0."""
        count, width = batch["input_ids"].shape
        size = int(self.config.get("logprob_batch_size") or self.config["train_micro_batch_size"])
        inputs = {name: batch[name] for name in ("input_ids", "input_lengths")}
        micro = self._micro_batches(range(count), size)
        found: list[torch.Tensor] = []

        def keep(outputs: list[torch.Tensor], part: Batch, rows: range) -> tuple[torch.Tensor, dict[str, float]]:
            (logprobs,) = outputs
            if rows:
                found.append(F.pad(logprobs, (0, width - logprobs.shape[1])).cpu())
            return logprobs.sum(), {}

        for chunk in self.chunks:
            chunk.eval()
        with self._megatron(), torch.no_grad():
            self._run(inputs, micro, size, keep, forward_only=True)
        lengths = batch["input_lengths"][self.rows(count).start : self.rows(count).stop]
        result = torch.cat(found) if found else torch.zeros(len(self.rows(count)), width)
        return result.masked_fill_(torch.arange(width)[None] >= lengths[:, None], 0.0)

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step per ``train_global_batch_size`` rows of ``batch``, then one step of the schedule. Returns
        the metrics over all ranks, the same on each: the loss's own, and ``loss``, ``grad_norm``, ``lr``, ``wd``."""
        for chunk in self.chunks:
            chunk.train()
        steps = step_rows(len(batch["input_ids"]), int(self.config["train_global_batch_size"]))
        with self._megatron():
            metrics = average_updates([self._step(batch, rows, loss) for rows in steps])
        decay = (self.settings.get("optimizer") or {}).get("weight_decay", 0.01)
        metrics |= {"lr": self._rate.value, "wd": float(decay)}
        self._rate.step()
        return metrics

    def _step(self, batch: Batch, rows: range, loss: Loss) -> dict[str, float]:
        sums = batch_sums(select_rows(batch, slice(rows.start, rows.stop)))
        size = int(self.config["train_micro_batch_size"])
        micro = self._micro_batches(rows, size)
        # Megatron's schedule and gradient buffers average over micro-batches and data-parallel ranks; the loss is a
        # share of the global one, so it must add.
        scale = len(micro) * self._dp_size
        prediction_scale = float(self.settings.get("mtp_loss_scaling_factor", 0.1))

        def weigh(outputs: list[torch.Tensor], part: Batch, own: range) -> tuple[torch.Tensor, dict[str, float]]:
            if not own:
                return torch.stack([logprobs.sum() for logprobs in outputs]).sum() * 0.0, {}
            logprobs, *predicted = outputs
            value, found = loss(logprobs, part, sums)
            metrics = {"loss": float(value.detach()), **{n: float(v) for n, v in found.items()}}
            if predicted:
                prediction = prediction_loss(predicted, part, sums["tokens"])
                value, metrics["mtp_loss"] = value + prediction_scale * prediction, float(prediction.detach())
            return value * scale, metrics

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run(batch, micro, size, weigh, forward_only=False)
        applied, norm, _ = self.optimizer.step()
        if not applied:
            raise RuntimeError("the optimizer skipped a step: a gradient is not finite")
        return self._over_ranks(combine_parts(parts)) | {"grad_norm": float(norm)}

    def _micro_batches(self, rows: range, size: int) -> list[range]:
        """This rank's micro-batches; an interleaved schedule gets empty ones up to a multiple of the stages."""
        micro = list(micro_batch_rows(rows, self.dp_rank, self._dp_size, size))
        multiple = self._stages if len(self.chunks) > 1 else 1
        return micro + [range(0)] * (round_up(len(micro), multiple) - len(micro))

    def _run(self, batch: Batch, micro: list[range], size: int, result: Any, *, forward_only: bool) -> list[dict]:
        """Megatron's schedule over micro-batches; what ``result(log-probabilities, micro-batch, rows)`` gave for each,
        on the last stage. The first log-probabilities are the policy's, others those of prediction layers."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def feed() -> Iterator[tuple[Batch, range]]:
            for rows in micro:
                yield take_rows(batch, rows, self.device), rows

        def forward(iterator: Iterator[tuple[Batch, range]], model: nn.Module) -> tuple[torch.Tensor, Any]:
            part, rows = next(iterator)
            outputs = self._outputs(model, part, size, batch["input_ids"].shape[1])
            return outputs, lambda logits: result(self._logprobs_of(logits, part), part, rows)

        feeds = [feed() for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(feeds) > 1 else self.chunks[0],
            num_microbatches=len(micro),
            seq_length=round_up(batch["input_ids"].shape[1], self._tp_size),
            micro_batch_size=size,
            forward_only=forward_only,
        )

    def _outputs(self, model: nn.Module, part: Batch, size: int, width: int) -> torch.Tensor:
        """Logits on the last stage, hidden states on others. Padding is on the right, so that the causal mask keeps it
        out of the tokens that count."""
        ids = part["input_ids"]
        rows, length = ids.shape
        if self._stages > 1 or self.settings.get("moe_token_dispatcher_type") == "allgather":
            rows, length = size, width  # stages, and ranks that gather each other's tokens, agree on one shape
        length = round_up(length, self._tp_size)  # sequence parallelism cuts it
        ids = F.pad(ids, (0, length - ids.shape[1], 0, rows - ids.shape[0]))
        positions = torch.arange(length, device=ids.device).expand_as(ids)
        hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)[None, None]
        return model(input_ids=ids, position_ids=positions, attention_mask=hidden)

    def _logprobs_of(self, logits: torch.Tensor, part: Batch) -> list[torch.Tensor]:
        """Of the policy and, in training, of each prediction layer: the k-th reads k tokens further ahead."""
        ids = part["input_ids"]
        rows, length = ids.shape
        layers = int(self.settings.get("mtp_num_layers") or 0) if torch.is_grad_enabled() else 0
        temperature = float((self.config.get("generation") or {}).get("temperature") or 1.0)
        return [
            vocabulary_logprobs(
                own[:rows, : length - ahead],
                ids[:, ahead:],
                self._facts["vocab_size"],
                temperature,
                self.config.get("logprob_chunk_size"),
            )
            for ahead, own in enumerate(logits.chunk(1 + layers, dim=1))
        ]

    def _over_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        gathered: list[tuple[int, dict[str, float]]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.tp_rank, metrics), group=self._world.control)
        return combine_parts([part for tp_rank, part in gathered if tp_rank == 0])

    def keep_reference(self) -> None:
        """Copies the current weights; ``reference_logprobs`` uses them from now on."""
        self._reference = [p.detach().clone() for p in self._parameters()]

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """As ``logprobs``, under the weights of ``keep_reference``. Raises RuntimeError if there are none."""
        if self._reference is None:
            raise RuntimeError("reference_logprobs: no reference policy is kept; call keep_reference() before training")
        self._exchange_reference()
        try:
            return self.logprobs(batch)
        finally:
            self._exchange_reference()

    @torch.no_grad()
    def _exchange_reference(self) -> None:
        for live, kept in zip(self._parameters(), self._reference, strict=True):
            spare = live.detach().clone()
            live.detach().copy_(kept)
            kept.copy_(spare)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.parameters()]

    def source(self) -> MegatronSource:
        """What this rank holds, for a refit; always the same object."""
        return self._source

    def save_checkpoint(self, path: str | os.PathLike, extra: dict[str, Any]) -> None:
        """Writes model, optimizer, schedule and random state to the directory ``path``, all or nothing."""
        megatron_checkpoint.save(path, self.chunks, self.optimizer, self._rate, self._layout(), extra)

    def load_checkpoint(self, path: str | os.PathLike) -> dict[str, Any]:
        """Restores ``save_checkpoint``'s state, written by the same layout, and returns its ``extra``."""
        return megatron_checkpoint.load(path, self.chunks, self.optimizer, self._rate, self._layout())

    def _layout(self) -> dict[str, int]:
        return {
            "ranks": dist.get_world_size(),
            "tensor": self._tp_size,
            "pipeline": self._stages,
            "chunks": len(self.chunks),
            "expert": int(self.settings.get("expert_model_parallel_size") or 1),
            "expert_tensor": int(self.settings.get("expert_tensor_parallel_size") or 1),
        }

    def shutdown(self) -> None:
        """Leaves the process group it made. A process that used gloo should then end with ``os._exit``."""
        self._world.leave()


def _checkpoint_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    overrides = config.get("hf_config_overrides") or {}
    return AutoConfig.from_pretrained(config["model_name"], local_files_only=True, **overrides).to_dict()
