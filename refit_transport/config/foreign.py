"""Keys that users of other frameworks know and that this project does not have, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN: dict[str, str] = {
    "policy.tokenizer.chat_template_kwargs": "the chat template is used with its own defaults",
    "policy.tokenizer.use_fastokens": "the tokenizer is transformers' own",
    "policy.sequence_packing": "batches are padded, not packed",
    "policy.dynamic_batching": "micro-batches have a fixed number of sequences; set policy.train_micro_batch_size",
    "policy.draft": "draft models are not trained",
    "policy.offload_optimizer_for_logprob": "trainer and engine do not share GPUs, so nothing is offloaded",
    "policy.refit_buffer_size_gb": "set policy.generation.refit_cfg.<transport>.bucket_bytes",
    "policy.reward_model_cfg": "reward models are not trained",
    "policy.dtensor_cfg._v2": "there is one DTensor trainer",
    "policy.dtensor_cfg.sequence_parallel": "activations are not sharded along the sequence",
    "policy.dtensor_cfg.context_parallel_size": "context parallelism is not supported",
    "policy.dtensor_cfg.custom_parallel_plan": "the tensor-parallel plan is the model's own",
    "policy.dtensor_cfg.automodel_kwargs": "models are transformers models",
    "policy.dtensor_cfg.lora_cfg.exclude_modules": "name what to adapt in target_modules",
    "policy.dtensor_cfg.lora_cfg.dropout_position": "adapters have no dropout",
    "policy.dtensor_cfg.lora_cfg.lora_A_init": "Kaiming, as in peft",
    "policy.dtensor_cfg.lora_cfg.use_triton": "adapters are plain linear layers",
    "policy.megatron_cfg.peft": "adapters are not trained",
    "policy.megatron_cfg.fp8_cfg": "training in FP8 is not supported",
    "policy.megatron_cfg.scheduler": "set policy.scheduler",
    "policy.megatron_cfg.moe_enable_deepep": "set policy.megatron_cfg.moe_token_dispatcher_type",
    "policy.megatron_cfg.model_overrides": "set policy.hf_config_overrides",
    "policy.megatron_cfg.env_vars": "set the environment of the command",
    "policy.megatron_cfg.checkpoint": "see checkpointing.*",
    "policy.generation.port_range_low": "free ports are chosen without it",
    "policy.generation.port_range_high": "free ports are chosen without it",
    "policy.generation.quant_cfg": "quantised rollouts are not supported",
    "policy.generation.real_quant": "quantised rollouts are not supported",
    "policy.generation.sglang_cfg": "the engine is vllm",
    "policy.generation.trtllm_cfg": "the engine is vllm",
    "policy.generation.mcore_generation_config": "the engine is vllm",
    "policy.generation.vllm_cfg.is_mx": "quantised rollouts are not supported",
    "policy.generation.vllm_cfg.use_deep_gemm": "set policy.generation.vllm_cfg.env_vars",
    "policy.generation.vllm_cfg.expose_http_server": "start vllm serve with --weight-transfer-config instead",
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": "the engine's own metrics are not logged",
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": "quantised rollouts are not supported",
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": "quantised rollouts are not supported",
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": "the cache is always dropped",
    "grpo.async_grpo.max_generation_failures": "a failed generation ends the run",
    "ppo.async_ppo": "rollouts and training alternate in PPO",
    "async_rl": "see grpo.async_grpo",
    "grpo.calculate_advantages_on_gpu": "advantages are computed on the CPU",
    "grpo.invalid_tool_call_advantage": "tool calls are not supported",
    "grpo.malformed_thinking_advantage": "thinking tags are not checked",
    "reward_penalties": "write a reward function and name it in env.reward",
    "cluster.master_port_range_low": "ports are chosen by the system and kept open from then on",
    "cluster.master_port_range_high": "ports are chosen by the system and kept open from then on",
    "logger.wandb_enabled": "metrics go to metrics.jsonl and TensorBoard",
    "logger.wandb": "metrics go to metrics.jsonl and TensorBoard",
    "logger.mlflow_enabled": "metrics go to metrics.jsonl and TensorBoard",
    "logger.mlflow": "metrics go to metrics.jsonl and TensorBoard",
    "logger.swanlab_enabled": "metrics go to metrics.jsonl and TensorBoard",
    "logger.swanlab": "metrics go to metrics.jsonl and TensorBoard",
    "logger.tensorboard": "set logger.log_dir",
    "logger.monitor_gpus": "GPU use is not logged",
    "logger.gpu_monitoring": "GPU use is not logged",
    "checkpointing.save_optimizer": "the optimizer is part of every checkpoint",
}
"""Path, or prefix of paths, to what to know instead."""


def foreign_prefix(path: str) -> str | None:
    """The entry of ``FOREIGN`` that ``path`` falls under."""
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in FOREIGN), None)


def is_inert(value: object) -> bool:
    """A foreign key that is switched off asks for nothing, so that files copied from elsewhere need no pruning."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled", None) is False
    return value is None or value is False
