"""Lets Megatron-core build, run and train models on CPU with gloo, for tests and demonstrations without a GPU.

Megatron-core asks torch.cuda for a device, streams and random state in many places. Inside ``on_cpu`` these questions
are answered with the CPU. Nothing of Megatron's models, schedules or optimizers is replaced, except the norm that torch
lacks under sequence parallelism. It refuses to run where there is a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextmanager
def on_cpu() -> Iterator[None]:
    """Everything that calls into Megatron-core on CPU goes inside. Raises RuntimeError on a machine with a GPU."""
    if torch.cuda.is_available():
        raise RuntimeError("on_cpu: stands in for CUDA where there is none, but this machine has a CUDA device")
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda *_: _Stream()),
        (torch.cuda, "default_stream", lambda *_: _Stream()),
        (torch.cuda, "stream", lambda *_: nullcontext()),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (logging.getLogger(random.__name__), "disabled", True),  # it warns that CPU and CUDA share a random state
        (dist, "all_to_all_single", _all_to_all_single(dist.all_to_all_single)),
        (dist, "all_gather", _all_gather(dist.all_gather)),
        (dist, "reduce_scatter", _reduce_scatter(dist.reduce_scatter)),
        (WrappedTorchNorm, "__new__", staticmethod(_norm(WrappedTorchNorm.__new__))),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(patch.object(owner, name, stand_in))
        # 0.16.1 forgets to define it where TransformerEngine is not installed.
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(_CpuDevice())
        yield


class _Stream:
    """Stream and event of a device that does everything in order."""

    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = record = synchronize = wait = wait_stream

    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True


class _CpuDevice(TorchFunctionMode):
    """Tensors asked for on a CUDA device are made on the CPU, and say that they are CUDA tensors where asked for their
    type's name (the optimizer accepts no other)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return _CPU if is_cuda else value


def _all_to_all_single(original: Any) -> Any:
    """Gloo wants lists where NCCL takes tensors of split sizes."""

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def call(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        return original(output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op)

    return call


def _all_gather(original: Any) -> Any:
    """Gloo gathers only tensors of one shape."""

    def call(outputs, tensor, group=None, async_op=False):
        longest = max(len(out) for out in outputs)
        if all(len(out) == longest for out in outputs):
            return original(outputs, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in outputs]
        original(gathered, padded, group=group)
        for out, full in zip(outputs, gathered, strict=True):
            out.copy_(full[: len(out)])
        return None

    return call


def _reduce_scatter(original: Any) -> Any:
    """Gloo scatters only tensors of one shape."""

    def call(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({tensor.shape for tensor in inputs}) == 1:
            return original(output, list(inputs), op=op, group=group, async_op=async_op)
        for rank, tensor in enumerate(inputs):
            total = tensor.clone().contiguous()
            dist.all_reduce(total, op=op, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)
        return None

    return call


def _norm(original: Any) -> Any:
    def new(cls, config, hidden_size, eps=1e-5, *args, **kwargs):
        if config.sequence_parallel and config.normalization == "RMSNorm":
            return _SequenceParallelRMSNorm(config, hidden_size, eps)
        return original(cls, config, hidden_size, eps, *args, **kwargs)

    return new


class _SequenceParallelRMSNorm(nn.RMSNorm):
    """torch's norm, with the mark that makes Megatron add up its gradient over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = True
