"""Wraps Megatron chunks for training: gradient buffers, Megatron's optimizer, and a torch learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from refit_transport.rl.policy.optimizer import build_scheduler


def data_parallel(chunks: Sequence[nn.Module], settings: Mapping[str, Any]) -> list[nn.Module]:
    """The chunks inside Float16Module (bfloat16) and Megatron's DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config = chunks[0].config
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=_distributed(settings),
        overlap_param_gather=False,
    )
    if config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [
        DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def build_optimizer(chunks: Sequence[nn.Module], settings: Mapping[str, Any], max_norm: float | None) -> Any:
    """Megatron's Adam over the wrapped ``chunks``, from ``megatron_cfg.optimizer``. Gradients are clipped to
    ``max_norm``; None only measures their norm."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = chunks[0].config
    chosen = settings.get("optimizer") or {}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=float(chosen.get("lr", 5e-6)),
            weight_decay=float(chosen.get("weight_decay", 0.01)),
            adam_beta1=float(chosen.get("adam_beta1", 0.9)),
            adam_beta2=float(chosen.get("adam_beta2", 0.999)),
            adam_eps=float(chosen.get("adam_eps", 1e-8)),
            clip_grad=float("inf") if max_norm is None else float(max_norm),
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=_distributed(settings),
        ),
        list(chunks),
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return optimizer


def _distributed(settings: Mapping[str, Any]) -> bool:
    return bool((settings.get("optimizer") or {}).get("use_distributed_optimizer", True))


class LearningRate:
    """``policy.scheduler``'s torch schedules, applied to an optimizer that is not torch's."""

    def __init__(self, optimizer: Any, schedule: Any) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        start = groups[0]["lr"] if groups else 0.0
        self._shadow = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=start)
        self._scheduler = build_scheduler(self._shadow, schedule)
        self._apply()

    @property
    def value(self) -> float:
        return float(self._shadow.param_groups[0]["lr"])

    def step(self) -> None:
        """To the next step of the schedule."""
        if self._scheduler is not None:
            self._shadow.step()  # torch warns when a schedule moves before its optimizer did
            self._scheduler.step()
            self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.value, "schedule": self._scheduler.state_dict() if self._scheduler else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._shadow.param_groups[0]["lr"] = state["rate"]
        if self._scheduler is not None and state["schedule"] is not None:
            self._scheduler.load_state_dict(state["schedule"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.value
