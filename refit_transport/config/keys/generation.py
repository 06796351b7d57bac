"""Keys of the inference side: `policy.generation.*`, and of the refit that feeds it."""

from __future__ import annotations

from refit_transport.config.key import Key, section
from refit_transport.config.keys.policy import PRECISIONS

ENGINE_KEYS = (
    Key("tensor_parallel_size", int, 1, "Tensor-parallel ranks of one engine.", minimum=1),
    Key("pipeline_parallel_size", int, 1, "Pipeline stages of one engine.", minimum=1),
    Key(
        "expert_parallel_size",
        int,
        1,
        "1, or a multiple of the tensor-parallel size: experts spread over so many ranks. Beyond the tensor-parallel "
        "size the engine has data-parallel attention, with `expert_parallel_size / tensor_parallel_size` cores.",
        minimum=1,
    ),
    Key("gpu_memory_utilization", float, 0.6, "Share of a GPU's memory for the engine.", above=0, maximum=1),
    Key("env_vars", dict, {}, "Environment of the engine's processes; numbers in quotes.", values=str),
)
"""What the engines of one run may differ in."""

GENERATION = section(
    "policy.generation",
    "Generation",
    "The engine that produces rollouts, and which transport brings it new weights.",
    Key("backend", str, "vllm", "Inference engine.", choices=("vllm",)),
    Key(
        "refit_transport",
        str,
        None,
        "`nccl_reshard` sends feed-forward weights shard to shard; `null` is packed gather-and-broadcast; "
        "`module:ClassName` is a plug-in.",
    ),
    Key("max_new_tokens", int, "${policy.max_total_sequence_length}", "Longest answer, in tokens.", minimum=1),
    Key("temperature", float, 1.0, "Sampling temperature.", minimum=0),
    Key("top_p", float, 1.0, "Nucleus sampling.", above=0, maximum=1),
    Key("top_k", int, None, "Sample among the k likeliest tokens.", minimum=1),
    Key("val_temperature", float, "${policy.generation.temperature}", "Temperature in validation.", minimum=0),
    Key("val_top_p", float, "${policy.generation.top_p}", "Nucleus sampling in validation.", above=0, maximum=1),
    Key(
        "val_top_k",
        int,
        "${policy.generation.top_k}",
        "Sample among the k likeliest tokens in validation.",
        minimum=1,
        optional=True,
    ),
    Key("stop_token_ids", list, None, "Tokens that end an answer, besides the model's own."),
    Key("stop_strings", list, None, "Strings that end an answer."),
    Key("vllm_kwargs", dict, {}, "Passed to vLLM as they are."),
    Key(
        "replicas",
        list,
        None,
        "One item per engine, where engines differ: what it sets instead of `vllm_cfg`, such as "
        "`[{tensor_parallel_size: 2}, {tensor_parallel_size: 1}]`. Together the engines take all ranks that generate, "
        "and each gets its share of the prompts by its ranks.",
        items=ENGINE_KEYS,
    ),
    Key(
        "colocated.enabled",
        bool,
        True,
        "Trainer and engine share GPUs. This project moves weights between separate GPUs, so it has to be `false`.",
    ),
    Key(
        "colocated.resources.gpus_per_node",
        int,
        None,
        "GPUs (on CPU: processes) given to generation, per node; the rest trains.",
        minimum=1,
    ),
    Key("colocated.resources.num_nodes", int, None, "Whole nodes given to generation.", minimum=1),
)

VLLM = section(
    "policy.generation.vllm_cfg",
    "vLLM",
    "One engine spans data x tensor x pipeline parallel ranks. As many engines start as fit, unless "
    "`policy.generation.replicas` lists them.",
    Key("async_engine", bool, False, "Use the asynchronous engine.", choices=(False,)),
    Key("precision", str, "${policy.precision}", "dtype of the engine's weights.", choices=PRECISIONS),
    Key("kv_cache_dtype", str, "auto", "dtype of the KV cache.", choices=("auto", "bfloat16", "float16")),
    Key(
        "logprobs_mode",
        str,
        "processed_logprobs",
        "Which log-probabilities the engine returns.",
        choices=("processed_logprobs", "raw_logprobs"),
    ),
    *ENGINE_KEYS,
    Key("max_model_len", int, "${policy.max_total_sequence_length}", "Longest sequence of the engine.", minimum=2),
    Key("enforce_eager", bool, False, "Do not capture CUDA graphs. CPU recipes set `true`."),
    Key("use_tqdm", bool, True, "Write vLLM's own progress bar to the log of each engine."),
    Key(
        "load_format",
        str,
        "auto",
        "`dummy` starts with random weights, which the first refit replaces.",
        choices=("auto", "dummy", "safetensors"),
    ),
)

BUCKET_BYTES = 256 << 20
CASTS = ("auto", "bfloat16", "float32")


def _carriage(*wires: str) -> tuple[Key, ...]:
    """What both transports have in common."""
    return (
        Key(
            "bucket_bytes",
            int,
            BUCKET_BYTES,
            "Half of what a rank may stage at once, in plus out. It is staged as four buckets of half this size.",
            minimum=4096,
        ),
        Key(
            "wire",
            str,
            "auto",
            "What carries the bytes. `auto`: NCCL between GPUs, sockets and shared memory between CPU processes.",
            choices=("auto", *wires),
        ),
        Key(
            "wire_dtype",
            str,
            "auto",
            "dtype in which floating tensors travel. `auto` casts on the side where fewer bytes cross. A forced dtype "
            "never narrows a tensor of which both sides hold more: FP32 buffers stay FP32, and the plan names them.",
            choices=CASTS,
        ),
        Key(
            "timeout_s",
            float,
            120.0,
            "A join or a refit that takes longer fails on every rank, naming the peer.",
            above=0,
        ),
        Key(
            "verify",
            str,
            "none",
            "`checksum` sums every region before it is sent and after it is stored, and compares both before engines "
            "commit: a changed bit fails the refit on every rank, naming parameter, region and ranks. It also says "
            "when no weight changed since the version before. See [Numbers](numbers.md#verification).",
            choices=("none", "checksum"),
        ),
        Key(
            "domains",
            str,
            "auto",
            "Which ranks share a fast link: those of one `host`, of one `segment` of `cluster.segment_size` nodes, or "
            "none (`rank`). `auto` is `segment` where a segment size is set, else `host`.",
            choices=("auto", "host", "segment", "rank"),
        ),
    )


REFIT = (
    section(
        "policy.generation.refit_cfg.nccl_reshard",
        "Transport `nccl_reshard`",
        "Options of the shard-to-shard transport.",
        Key(
            "scope",
            str,
            "ffn",
            "`ffn` reshards feed-forward projections; `all` reshards every parameter that can be mapped and names the "
            "rest.",
            choices=("ffn", "all"),
        ),
        *_carriage("tcp", "gloo", "nccl", "nccl_m2n"),
        Key(
            "relay",
            str,
            "auto",
            "Forward a copy from domain to domain instead of sending it again: when it lowers the bottleneck, or by "
            "force.",
            choices=("auto", "never", "always"),
        ),
        Key(
            "network_ports",
            str,
            "rank",
            "Who has a network port of its own, which `relay: auto` has to know: every `rank`, or every `domain`, "
            "whose ranks share it.",
            choices=("rank", "domain"),
        ),
        Key(
            "quantize",
            str,
            "none",
            "Linear weights leave the trainers in FP8 with their scales, for an engine that holds them so: "
            "`fp8_blockwise` in blocks of 128 x 128, `mxfp8` in blocks of 1 x 32. See [Numbers](numbers.md#fp8).",
            choices=("none", "fp8_blockwise", "mxfp8"),
        ),
    ),
    section(
        "policy.generation.refit_cfg.gather_broadcast",
        "Transport `gather_broadcast`",
        "Options of the transport that `refit_transport: null` means.",
        *_carriage("tcp", "gloo", "nccl"),
        Key(
            "root",
            str,
            "every",
            "`every` trainer rank broadcasts the part it holds, so that all links share the work; `single` gathers "
            "whole tensors on one rank first.",
            choices=("every", "single"),
        ),
    ),
)
