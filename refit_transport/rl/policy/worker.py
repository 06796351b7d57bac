"""One trainer rank: holds a shard of a model, computes log-probabilities, takes optimizer steps, keeps checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from refit_transport.layout.layout import LogicalParameter
from refit_transport.rl.batch import Batch, batch_sums, select_rows
from refit_transport.rl.metrics import average_updates, combine_parts
from refit_transport.rl.policy import checkpoint, export
from refit_transport.rl.policy.loading import load_sharded
from refit_transport.rl.policy.logprobs import token_logprobs
from refit_transport.rl.policy.lora import add_adapters
from refit_transport.rl.policy.micro_batches import Loss, micro_batch_rows, rank_rows, step_rows, take_rows
from refit_transport.rl.policy.optimizer import build_optimizer, build_scheduler, clip_gradients
from refit_transport.rl.policy.parallel import ParallelSizes, local_shards
from refit_transport.rl.policy.world import TrainerWorld
from refit_transport.trainers.dtensor import DTensorSource


class ModelWorker:
    """What policy and value workers share. ``config`` is the ``policy.*`` (or ``value.*``) sub-tree as a plain dict.

    Every rank of the world makes one, at the same time, and then calls the same methods in the same order with the same
    arguments: a batch is handed whole to each rank, which works on its own rows of it. A process group that the process
    already has is used; else one is made at ``master_addr:master_port``.
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
        self.config, self.rank = config, rank
        self.sizes = ParallelSizes.of(config.get("dtensor_cfg") or {}, world_size)
        self._world = TrainerWorld.join(rank, world_size, master_addr, master_port, timeout_s)
        self.device = self._world.device
        self.dp_rank, self.tp_rank = divmod(rank, self.sizes.tp)
        self.model = self._load()
        self.optimizer = build_optimizer(self.model.parameters(), config.get("optimizer"))
        self.scheduler = build_scheduler(self.optimizer, config.get("scheduler"))

    def _load(self) -> torch.nn.Module:
        raise NotImplementedError

    def _outputs(self, batch: Batch) -> torch.Tensor:
        """Float32 [b, s], aligned with ``input_ids``."""
        raise NotImplementedError

    def rows(self, count: int) -> range:
        """Which of ``count`` rows this rank computes; ranks that differ only in ``tp_rank`` compute the same."""
        return rank_rows(range(count), self.dp_rank, self.sizes.dp)

    @torch.no_grad()
    def infer(self, batch: Batch) -> torch.Tensor:
        """Float32 [len(rows), s] on CPU: the outputs for this rank's rows of ``batch``, zero at padding."""
        self.model.eval()
        count, width = batch["input_ids"].shape
        size = int(self.config.get("logprob_batch_size") or self.config["train_micro_batch_size"])
        inputs = {name: batch[name] for name in ("input_ids", "input_lengths")}
        result = torch.zeros(len(self.rows(count)), width)
        done = 0
        for rows in micro_batch_rows(range(count), self.dp_rank, self.sizes.dp, size):
            outputs = self._outputs(take_rows(inputs, rows, self.device))
            if rows:
                result[done : done + len(rows), : outputs.shape[1]] = outputs.cpu()
                done += len(rows)
        lengths = batch["input_lengths"][self.rows(count).start : self.rows(count).stop]
        return result.masked_fill_(torch.arange(width)[None] >= lengths[:, None], 0.0)

    def train(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step per ``train_global_batch_size`` rows of ``batch``, then one step of the schedule. Returns
        the metrics over all ranks, the same on each: the loss's own, and ``loss``, ``grad_norm``, ``lr``, ``wd``."""
        self.model.train()
        steps = step_rows(len(batch["input_ids"]), int(self.config["train_global_batch_size"]))
        metrics = average_updates([self._step(batch, rows, loss) for rows in steps])
        group = self.optimizer.param_groups[0]
        metrics |= {"lr": float(group["lr"]), "wd": float(group.get("weight_decay", 0.0))}
        if self.scheduler is not None:
            self.scheduler.step()
        return metrics

    def _step(self, batch: Batch, rows: range, loss: Loss) -> dict[str, float]:
        sums = batch_sums(select_rows(batch, slice(rows.start, rows.stop)))
        size = int(self.config["train_micro_batch_size"])
        parts = [
            self._accumulate(batch, micro, loss, sums)
            for micro in micro_batch_rows(rows, self.dp_rank, self.sizes.dp, size)
        ]
        norm = clip_gradients(self.model.parameters(), self.config.get("max_grad_norm"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._over_ranks(combine_parts(parts)) | {"grad_norm": norm}

    def _accumulate(self, batch: Batch, rows: range, loss: Loss, sums: Mapping[str, float]) -> dict[str, float]:
        part = take_rows(batch, rows, self.device)
        outputs = self._outputs(part)
        value, metrics = loss(outputs, part, sums) if rows else (outputs.sum() * 0.0, {})
        # FSDP averages gradients over the data-parallel ranks; the loss is a share of the global one, so it must add.
        (value * self.sizes.dp).backward()
        return {"loss": float(value.detach()), **{n: float(v) for n, v in metrics.items()}} if rows else {}

    def _over_ranks(self, metrics: dict[str, float]) -> dict[str, float]:
        gathered: list[tuple[int, dict[str, float]]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.tp_rank, metrics), group=self._world.control)
        return combine_parts([part for tp_rank, part in gathered if tp_rank == 0])

    def save_checkpoint(self, path: str | os.PathLike, extra: dict[str, Any]) -> None:
        """Writes model, optimizer, schedule and random state to the directory ``path``, all or nothing."""
        checkpoint.save(path, self.model, self.optimizer, self.scheduler, extra)

    def load_checkpoint(self, path: str | os.PathLike) -> dict[str, Any]:
        """Restores ``save_checkpoint``'s state and returns its ``extra``."""
        return checkpoint.load(path, self.model, self.optimizer, self.scheduler)

    def shutdown(self) -> None:
        """Leaves the process group it made. A process that used gloo should then end with ``os._exit``."""
        self._world.leave()


class PolicyWorker(ModelWorker):
    """The trained policy."""

    _reference: list[torch.Tensor] | None = None
    _source: DTensorSource | None = None

    def _load(self) -> torch.nn.Module:
        lora = (self.config.get("dtensor_cfg") or {}).get("lora_cfg") or {}
        wrap = partial(add_adapters, config=lora) if lora.get("enabled") else None
        if wrap is not None and self.sizes.tp > 1:
            raise ValueError(
                f"policy.dtensor_cfg.lora_cfg.enabled: got true with tensor_parallel_size {self.sizes.tp}, allowed "
                "false, or tensor_parallel_size: 1"
            )
        return load_sharded(self.config, self.sizes, self.device, wrap)

    def _outputs(self, batch: Batch) -> torch.Tensor:
        # Padding is on the right, so causal attention needs no mask to keep it out of the tokens that count.
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        generation = self.config.get("generation") or {}
        temperature = float(generation.get("temperature") or 1.0)
        return token_logprobs(logits, batch["input_ids"], temperature, self.config.get("logprob_chunk_size"))

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Float32 [len(rows), s]: log-probabilities of this rank's rows under the current weights."""
        return self.infer(batch)

    def keep_reference(self) -> None:
        """Remembers the current weights as the reference policy: a copy of this rank's shard of what is trained."""
        self._reference = [p.clone() for p in local_shards(self.model)]

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """As ``logprobs``, under the weights of ``keep_reference``. Raises RuntimeError if there are none."""
        if self._reference is None:
            raise RuntimeError("reference_logprobs: no reference policy is kept; call keep_reference() before training")
        self._exchange_reference()
        try:
            return self.infer(batch)
        finally:
            self._exchange_reference()

    def _exchange_reference(self) -> None:
        """Swaps live and reference weights in place, one tensor at a time, so no third copy is needed."""
        for live, kept in zip(local_shards(self.model), self._reference, strict=True):
            spare = live.clone()
            live.copy_(kept)
            kept.copy_(spare)

    def source(self) -> DTensorSource:
        """What this rank holds, for a refit; always the same object. Every rank calls it."""
        if self._source is None:
            self._source = DTensorSource(self.model)
        return self._source

    def save_pretrained(self, path: str | os.PathLike, dtype: str | None = None) -> None:
        """Writes the current weights (adapters merged) as a Hugging Face checkpoint, with the configuration and the
        tokenizer of ``model_name``. ``dtype`` such as ``"bfloat16"`` is for all but the tensors that the model keeps
        in float32; None keeps what is in memory. Every rank calls it."""
        source = self.source()
        source.refresh()
        kept = re.compile("|".join(map(re.escape, _kept_in_float32(self.model))) or r"(?!)")

        def dtype_of(parameter: LogicalParameter) -> str:
            return parameter.dtype if dtype is None or kept.search(parameter.name) else dtype

        export.save_pretrained(source, self.config["model_name"], path, dtype_of, self._world.control)


def _kept_in_float32(model: torch.nn.Module) -> set[str]:
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {pattern for name in names for pattern in getattr(model, name, None) or ()}
