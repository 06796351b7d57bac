"""What vLLM's CPU platform does to weights once after loading, repeated after each refit; and gaps of it, mended.

Each of these has a test that fails without it. On other devices nothing here runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding


def repack_experts(module: nn.Module) -> None:
    """vLLM packs expert weights for its grouped kernel on the first load only: later plain weights would land in packed
    storage. ``module`` is in model format."""
    if not isinstance(module, RoutedExperts):
        return
    kernel = getattr(module.quant_method, "moe_kernel", None)
    if kernel is not None:
        kernel.fused_experts.process_weights_after_loading(module)


def refresh_embeddings(model: nn.Module) -> None:
    """The head reads a packed copy of its weight. A head that is tied to the embedding is loaded by no tensor of its
    own, so all are packed anew."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod:
            module.quant_method.process_weights_after_loading(module)


def refresh_conv_weights(model: nn.Module) -> None:
    """Mamba keeps a view of its convolution from before packing, which the fallback kernels read."""
    for module in model.modules():
        unpacked = getattr(getattr(module, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        view = getattr(module, "conv_weights", None)
        if isinstance(unpacked, torch.Tensor) and isinstance(view, torch.Tensor):
            view.copy_(unpacked)


def map_expert_ids() -> None:
    """vLLM's CPU experts index their local weights with global expert ids, which reads out of bounds with expert
    parallelism. Ids are mapped to local ones, and experts of other ranks get weight zero."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply
    if getattr(original, "maps_expert_ids", False):
        return

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        original(
            self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
            *args, **kwargs,
        )  # fmt: skip

    apply.maps_expert_ids = True  # type: ignore[attr-defined]
    CPUUnquantizedExperts.apply = apply


def exchange_tokens_of_experts() -> None:
    """With data-parallel attention every expert rank needs the tokens of all, and returns sums to their owners. vLLM's
    CPU platform lacks both exchanges, of different numbers of tokens per rank."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for method in (all_gatherv, reduce_scatterv):
        if method.__name__ not in vars(CpuCommunicator):
            setattr(CpuCommunicator, method.__name__, method)


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Rows of every rank, in their order; rank i of the group has ``sizes[i]`` of them, or as many as this one."""
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    counts = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(counts), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's ``sizes[rank]`` slices along ``dim`` of the sum over all ranks."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes or total.shape[dim] // self.world_size, dim)[self.rank_in_group].contiguous()


def allocate_pipeline_buffers(model_runner: Any) -> None:
    """With eager execution and a fixed cache size vLLM skips the warm-up that allocates what a later pipeline stage
    receives into, and the first forward fails."""
    if model_runner.intermediate_tensors is None:
        model_runner.intermediate_tensors = model_runner.model.make_empty_intermediate_tensors(
            batch_size=model_runner.max_num_tokens, dtype=model_runner.model_config.dtype, device=model_runner.device
        )


def keep_linear_weights_live() -> None:
    """Make linear layers of models built from now on compute with their plain weight, as on CUDA, instead of packing
    it into a closure and dropping it. Then they are written in place, at the cost of the packed kernel's speed."""
    from vllm.model_executor.layers.linear import LinearBase

    LinearBase._cpu_skip_gemm_dispatch = True
