"""vLLM engines for tests: their options in one place, started once per family and shared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from refit_transport.layout.describe import Holding, describe
from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region
from refit_transport.planning import PlanOptions, compile_program, plan_refit
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.staging import Staging
from refit_transport.trainers.tensors import TensorSource
from tests.models import make_model, read_checkpoint

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

EXTENSION = "refit_transport.engines.vllm.extension.RefitExtension"
OPTIONS: dict[str, Any] = dict(
    enforce_eager=True,
    max_model_len=128,
    max_num_seqs=8,
    dtype="bfloat16",
    enable_prefix_caching=False,
    kv_cache_memory_bytes=32 << 20,
    weight_transfer_config={"backend": "nccl_reshard"},
    worker_extension_cls=EXTENSION,
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe_uneven": ("qwen3_moe", dict(moe_intermediate_size=40, num_experts=7)),
}
"""Families with sizes that kernels pad and ranks do not divide."""

PROMPTS = ["hello world 12+13=", "the quick brown fox", "abc" * 20]


def start_engine(path: Path, **options: Any) -> Any:
    """A vLLM ``LLM``: inside this process unless it has several workers."""
    single = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) == 1
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if single else "1"
    from vllm import LLM

    # In whole GiB, and it wins over kv_cache_memory_bytes: twenty engines of this process would fill the machine.
    space = os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    try:
        llm = LLM(model=str(path), **{**OPTIONS, **options})
    finally:
        if space is not None:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = space
    if single:
        _make_expert_group()
    return llm


def _make_expert_group() -> None:
    """The first engine of a process makes the process groups, and one without experts makes none for experts."""
    from vllm.distributed import parallel_state

    if parallel_state._EP is None:
        rank = parallel_state.get_world_group().local_rank
        parallel_state._EP = parallel_state.init_model_parallel_group([[0]], rank, "gloo", group_name="ep")


def worker_of(llm: Any) -> Any:
    """The worker of an engine inside this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def prompts_of(llm: Any) -> list[Any]:
    """Texts, and for a model that sees, one of them after an image."""
    if not llm.model_config.is_multimodal_model:
        return PROMPTS
    from PIL import Image

    image = Image.linear_gradient("L").rotate(30).convert("RGB")
    return [*PROMPTS, {"prompt": f"<image>{PROMPTS[0]}", "multi_modal_data": {"image": image}}]


def outputs_of(llm: Any, tokens: int = 12) -> list[tuple[list[int], list[float], list[float]]]:
    """Per prompt: greedy tokens, their log-probabilities, those of the prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    return [
        (
            list(output.outputs[0].token_ids),
            [
                step[token].logprob
                for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
            [next(iter(step.values())).logprob for step in output.prompt_logprobs if step],
        )
        for output in llm.generate(prompts_of(llm), sampling, use_tqdm=False)
    ]


def parameters_of(checkpoint: dict[str, torch.Tensor]) -> list[LogicalParameter]:
    return [
        LogicalParameter(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in sorted(checkpoint.items())
    ]


class LocalRefit:
    """Plays the transport: brings checkpoints to a sink from tensors of this process."""

    def __init__(self, sink: Any, checkpoint: dict[str, torch.Tensor], direct: frozenset[str] | None = None) -> None:
        self.sink = sink
        self.description = sink.describe(parameters_of(checkpoint), frozenset(checkpoint) if direct is None else direct)
        self.version = 0
        self.peak_staged_bytes = 0

    def bring(self, checkpoint: dict[str, torch.Tensor]) -> None:
        self.version += 1
        self.sink.begin(self.version)
        for name in sorted(checkpoint):
            self.bring_one(name, checkpoint[name])
        self.sink.commit(self.version)

    def bring_one(self, name: str, tensor: torch.Tensor) -> None:
        """Direct regions are written in two parts each, as buckets do."""
        if name in self.description.direct:
            for region in self.description.direct[name]:
                for part in halves(region):
                    self.sink.view(name, part).copy_(tensor[part.slices()])
            self.peak_staged_bytes = max(self.peak_staged_bytes, self.sink.staged_bytes)
            self.sink.arrived([name], [])
        elif name in self.description.whole:
            dtype = getattr(torch, self.description.dtypes[name])
            self.sink.arrived([], [(name, tensor.to(dtype).contiguous())])


def bind_alone(sink: Any, tensors: dict[str, torch.Tensor]) -> Binding:
    """A binding of one rank that trains ``tensors`` and serves ``sink``, over small buckets."""
    parameters = parameters_of(tensors)
    described = sink.describe(parameters, frozenset(tensors))
    held, needed = [], []
    for p in parameters:
        dtype, everything = described.dtypes.get(p.name), (Region.whole(p.shape),)
        held.append(Holding((p.name,), p.shape, p.dtype, everything))
        if p.name in described.direct:
            needed.append(Holding((p.name,), p.shape, dtype, described.direct[p.name]))
        elif p.name in described.whole:
            needed.append(Holding((p.name,), p.shape, dtype, everything, whole=True))
    options = PlanOptions(bucket_bytes=1 << 14)
    plan = plan_refit(describe({0: held}), describe({0: needed}), parameters, ((0,),), options)
    views = {p.name: [(Region.whole(p.shape), tensors[p.name])] for p in parameters}
    source = TensorSource({p.name: p.shape for p in parameters}, views)
    binding = Binding(plan, compile_program(plan, 0), source, sink)
    binding.bind(Staging())
    return binding


def halves(region: Any) -> list[Any]:
    """``region`` cut in two along its first dimension, where it has one."""
    if not region.start or region.stop[0] - region.start[0] < 2:
        return [region]
    middle = (region.start[0] + region.stop[0]) // 2
    return [
        type(region)(region.start, (middle, *region.stop[1:])),
        type(region)((middle, *region.start[1:]), region.stop),
    ]


def make_pair(name: str, folder: Path) -> dict[str, Path]:
    """Checkpoints A and B of a family or variant."""
    family, sizes = VARIANTS.get(name, (name, {}))
    return {which: make_model(family, folder / f"{name}-{which}", seed, **sizes) for seed, which in enumerate("ab")}


class Family:
    """Two random models of one family, A and B: their checkpoints, a live engine of A, and what fresh engines of both
    put out. vLLM's process groups are global and end with the first engine that is dropped, so all are kept."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.name = name
        self.paths = make_pair(name, folder)
        self.checkpoints = {which: read_checkpoint(path) for which, path in self.paths.items()}
        self.engines = {which: start_engine(path, **options) for which, path in self.paths.items()}
        self.llm = self.engines["a"]
        self.fresh = {which: outputs_of(llm) for which, llm in self.engines.items()}
        self.fingerprints = {which: fingerprint_of(llm) for which, llm in self.engines.items()}

    @property
    def model(self) -> torch.nn.Module:
        return worker_of(self.llm).get_model()

    def outputs(self, tokens: int = 12) -> list[Any]:
        """Of the engine after a refit. Who refits resets what the vision tower made of images before."""
        self.llm.llm_engine.reset_encoder_cache()
        return outputs_of(self.llm, tokens)

    def sink(self) -> Any:
        from refit_transport.engines.vllm.sink import VllmSink

        return VllmSink(self.model, worker_of(self.llm).vllm_config, torch.device("cpu"))


def fingerprint_of(llm: Any) -> dict[str, str]:
    """Of the first worker."""
    return llm.collective_rpc("weight_fingerprint")[0]
