"""Keys of the trained model: `policy.*`, its trainer back ends, and the value model that mirrors it."""

from __future__ import annotations

from dataclasses import replace

from refit_transport.config.key import REQUIRED, Key, Section, section

PRECISIONS = ("bfloat16", "float32", "float16")

POLICY = section(
    "policy",
    "Policy",
    "The model that is trained and how it is trained.",
    Key(
        "model_name",
        str,
        REQUIRED,
        "Directory of a Hugging Face checkpoint, or a built-in tiny model (`tiny/qwen3`, `tiny/qwen3-moe`) that is "
        "made with random weights and needs no download.",
    ),
    Key("tokenizer.name", str, "${policy.model_name}", "Directory of the tokenizer."),
    Key("hf_config_overrides", dict, {}, "Entries that replace those of the model's `config.json`."),
    Key("train_global_batch_size", int, 512, "Sequences per optimizer step.", minimum=1),
    Key("train_micro_batch_size", int, 4, "Sequences per forward and backward pass of one rank.", minimum=1),
    Key(
        "logprob_batch_size",
        int,
        "${policy.train_micro_batch_size}",
        "Sequences per forward pass when log-probabilities are computed.",
        minimum=1,
    ),
    Key(
        "logprob_chunk_size",
        int,
        None,
        "Tokens whose log-probabilities are computed at once; null computes all of a batch's.",
        minimum=1,
    ),
    Key("max_total_sequence_length", int, 512, "Longest prompt plus answer, in tokens.", minimum=2),
    Key("precision", str, "bfloat16", "dtype of the forward pass.", choices=PRECISIONS),
    Key(
        "make_sequence_length_divisible_by",
        int,
        "${policy.dtensor_cfg.tensor_parallel_size}",
        "Batches are padded to a multiple of this many tokens.",
        minimum=1,
    ),
    Key("max_grad_norm", float, 1.0, "Gradients are clipped to this norm; null clips nothing.", above=0, optional=True),
    Key("optimizer.name", str, "torch.optim.AdamW", "Dotted name of the optimizer's class."),
    Key(
        "optimizer.kwargs",
        dict,
        {"lr": 5e-6, "weight_decay": 0.01},
        "Its arguments. A recipe that sets some of them keeps the other defaults.",
    ),
    Key(
        "scheduler",
        list,
        None,
        "`torch.optim.lr_scheduler` classes as `{name, kwargs}`, and one `{milestones: [...]}` that says at which step "
        "the next one takes over.",
    ),
)

TINY_MODEL = section(
    "policy.tiny_model",
    "Built-in tiny models",
    "How a `tiny/...` model is made. A short supervised phase on the built-in task gives a random model something to "
    "reinforce. The result is kept, and made again only when these keys change.",
    Key("seed", int, 0, "Seed of the weights and of the examples.", minimum=0),
    Key("warm_start_steps", int, 25, "Supervised steps; 0 keeps the random weights.", minimum=0),
)


def _dtensor(prefix: str) -> Section:
    return section(
        f"{prefix}.dtensor_cfg",
        "DTensor trainer" + (" of the value model" if prefix == "value" else ""),
        "FSDP2 over a device mesh, with tensor, expert and replica dimensions. Data parallelism takes the ranks that "
        "the other dimensions leave.",
        Key("enabled", bool, True, "Use this trainer."),
        Key("tensor_parallel_size", int, 1, "Tensor-parallel ranks.", minimum=1),
        Key(
            "expert_parallel_size",
            int,
            1,
            "Ranks over which experts are spread: 1, or a multiple of the tensor-parallel size.",
            minimum=1,
        ),
        Key("dp_replicate_size", int, 1, "Replicas of the sharded model (HSDP).", minimum=1),
        Key("activation_checkpointing", bool, False, "Recompute activations in the backward pass."),
        Key("cpu_offload", bool, False, "Keep parameters in host memory between uses."),
    )


def _megatron(prefix: str) -> Section:
    return section(
        f"{prefix}.megatron_cfg",
        "Megatron trainer" + (" of the value model" if prefix == "value" else ""),
        "Megatron-core with tensor, pipeline, virtual pipeline and expert parallelism. The refit reads the layout from "
        "the live model; these keys only build it. The learning rate follows "
        "`policy.scheduler`; `policy.optimizer` is DTensor's.",
        Key("enabled", bool, False, "Use this trainer instead of DTensor."),
        Key("tensor_model_parallel_size", int, 1, "Tensor-parallel ranks.", minimum=1),
        Key("pipeline_model_parallel_size", int, 1, "Pipeline stages.", minimum=1),
        Key("virtual_pipeline_model_parallel_size", int, None, "Model chunks per stage.", minimum=1),
        Key("pipeline_model_parallel_layout", str, None, "Megatron's own layout text, such as `Et|tt|tt|tL`."),
        Key("num_layers_in_first_pipeline_stage", int, None, "Layers on the first stage.", minimum=0),
        Key("num_layers_in_last_pipeline_stage", int, None, "Layers on the last stage.", minimum=0),
        Key("account_for_embedding_in_pipeline_split", bool, False, "Count the embedding as a layer."),
        Key("account_for_loss_in_pipeline_split", bool, False, "Count the loss as a layer."),
        Key("expert_model_parallel_size", int, 1, "Ranks over which experts are spread.", minimum=1),
        Key("expert_tensor_parallel_size", int, 1, "Tensor-parallel ranks inside an expert.", minimum=1),
        Key("context_parallel_size", int, 1, "Context-parallel ranks.", choices=(1,)),
        Key("sequence_parallel", bool, False, "Shard activations along the sequence between tensor-parallel ranks."),
        Key(
            "moe_token_dispatcher_type", str, "alltoall", "How tokens reach experts.", choices=("alltoall", "allgather")
        ),
        Key("mtp_num_layers", int, 0, "Multi-token-prediction layers, trained beside the policy.", minimum=0),
        Key("mtp_loss_scaling_factor", float, 0.1, "Weight of the prediction layers' loss.", minimum=0),
        Key("optimizer.lr", float, 5e-6 if prefix == "policy" else 2e-6, "Learning rate.", above=0),
        Key("optimizer.weight_decay", float, 0.01, "Weight decay.", minimum=0),
        Key("optimizer.adam_beta1", float, 0.9, "Decay of Adam's mean of gradients.", minimum=0),
        Key("optimizer.adam_beta2", float, 0.999, "Decay of Adam's mean of squared gradients.", minimum=0),
        Key("optimizer.adam_eps", float, 1e-8, "Added to Adam's denominator.", above=0),
        Key("optimizer.use_distributed_optimizer", bool, True, "Shard the optimizer state."),
    )


DTENSOR = _dtensor("policy")
LORA = section(
    "policy.dtensor_cfg.lora_cfg",
    "LoRA",
    "Low-rank adapters beside linear layers, and nothing else trained. A refit sends merged weights: sums in float32, "
    "cast once.",
    Key("enabled", bool, False, "Train adapters instead of the model."),
    Key("dim", int, 8, "Rank of the adapters.", minimum=1),
    Key("alpha", float, 32, "An adapter counts `alpha / dim`.", above=0),
    Key("target_modules", list, [], "Patterns for a module's dotted name or its last part, such as `q_proj`."),
    Key("match_all_linear", bool, True, "Without patterns: adapt every linear layer but the output head."),
    Key("dropout", float, 0.0, "Dropout in front of the adapters.", choices=(0.0,)),
)
MEGATRON = _megatron("policy")

_VALUE_DEFAULTS = {
    "model_name": "${policy.model_name}",
    "tokenizer.name": "${policy.tokenizer.name}",
    "train_global_batch_size": "${policy.train_global_batch_size}",
    "train_micro_batch_size": "${policy.train_micro_batch_size}",
    "logprob_batch_size": "${value.train_micro_batch_size}",
    "max_total_sequence_length": "${policy.max_total_sequence_length}",
    "precision": "${policy.precision}",
    "make_sequence_length_divisible_by": "${policy.make_sequence_length_divisible_by}",
    "optimizer.kwargs": {"lr": 1e-5, "weight_decay": 0.01},
}
_TRAINER = "value.dtensor_cfg.enabled"
"""The critic has no other trainer, whatever the policy's is."""


def _value_keys() -> tuple[Key, ...]:
    """The policy's keys under `value`, with the value model's own defaults."""
    mirrored = []
    for key in (*POLICY.keys, *TINY_MODEL.keys, *DTENSOR.keys):
        name = key.path.removeprefix("policy.")
        follows = name.startswith(("tiny_model", "dtensor_cfg"))
        default = f"${{{key.path}}}" if follows else _VALUE_DEFAULTS.get(name, key.default)
        mirrored.append(replace(key, path=f"value.{name}", default=default))
    return tuple(replace(key, default=True, choices=(True,)) if key.path == _TRAINER else key for key in mirrored)


VALUE = Section(
    "value",
    "Value model (PPO)",
    "The critic. It mirrors `policy`, shares its GPUs, and has its own optimizer.",
    (
        *_value_keys(),
        Key("value.reward_model_cfg.enabled", bool, True, "One scalar per token from a linear head.", choices=(True,)),
    ),
)
