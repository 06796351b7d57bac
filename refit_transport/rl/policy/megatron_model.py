"""Builds the Megatron-core model of a Hugging Face configuration: process groups, configuration, pipeline chunks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from refit_transport.config.model_facts import megatron_obstacle, rope_parameters
from refit_transport.config.pipeline_layout import stages_of
from refit_transport.config.support import MEGATRON_TYPES
from refit_transport.rl.batch import round_up

Facts = Mapping[str, Any]
"""Content of a checkpoint's ``config.json``, with transformers' defaults filled in."""


def initialize_groups(settings: Mapping[str, Any]) -> None:
    """Megatron's process groups over the whole world, from ``policy.megatron_cfg``. Every rank calls it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    stages = settings.get("pipeline_model_parallel_size") or 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.get("tensor_model_parallel_size") or 1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=_virtual_stages(settings) if stages > 1 else None,
        expert_model_parallel_size=settings.get("expert_model_parallel_size") or 1,
        expert_tensor_parallel_size=settings.get("expert_tensor_parallel_size") or 1,
    )
    model_parallel_cuda_manual_seed(0)


def _virtual_stages(settings: Mapping[str, Any]) -> int | None:
    """Chunks per rank: as configured, or as many as a pipeline layout has more stages than ranks."""
    layout = settings.get("pipeline_model_parallel_layout")
    chunks = settings.get("virtual_pipeline_model_parallel_size")
    if layout and not chunks:
        chunks = len(stages_of(layout)) // settings["pipeline_model_parallel_size"]
    return chunks if chunks and chunks > 1 else None


def build_chunks(facts: Facts, settings: Mapping[str, Any], dtype: torch.dtype, sequence: int) -> list[nn.Module]:
    """This rank's model, one module per virtual pipeline stage, with weights drawn anew. ``sequence`` is the longest
    sequence in tokens. Raises ValueError for what Megatron-core cannot express, naming the key."""
    from megatron.core import parallel_state

    config = transformer_config(facts, settings, dtype)
    model_class = _model_class(config)
    transformer_engine = has_transformer_engine()
    chunks = []
    for stage in range(_virtual_stages(settings) or 1):
        virtual = stage if _virtual_stages(settings) else None
        layers, prediction = _specs(config, transformer_engine, virtual)
        chunks.append(
            model_class(
                config=config,
                transformer_layer_spec=layers,
                vocab_size=round_up(facts["vocab_size"], 128 * (settings.get("tensor_model_parallel_size") or 1)),
                max_sequence_length=sequence,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
                share_embeddings_and_output_weights=bool(facts.get("tie_word_embeddings")),
                position_embedding_type="rope",
                **_rotary_arguments(facts),
                mtp_block_spec=prediction,
                vp_stage=virtual,
            )
        )
    return chunks


def _model_class(config: Any) -> type[nn.Module]:
    if config.mtp_num_layers:
        from refit_transport.rl.policy.megatron_prediction import PredictingModel

        return PredictingModel
    from megatron.core.models.gpt import GPTModel

    return GPTModel


def has_transformer_engine() -> bool:
    """Whether its layers are used. Megatron's own have no latent attention and, on GPUs, no sequence parallelism."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None


def _specs(config: Any, transformer_engine: bool, stage: int | None) -> tuple[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    layers = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", vp_stage=stage)
    if not transformer_engine:
        layers.layer_norm = WrappedTorchNorm  # Apex' fused norm, where that is installed, knows no RMSNorm
    if not config.mtp_num_layers:
        return layers, None
    return layers, get_gpt_mtp_block_spec(config, layers, transformer_engine, vp_stage=stage)


def transformer_config(facts: Facts, settings: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Megatron's configuration of the checkpoint's architecture, cut as ``policy.megatron_cfg`` says."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = facts["model_type"]
    _check_family(facts)
    stages = settings.get("pipeline_model_parallel_size") or 1
    fields = dict(
        num_layers=facts["num_hidden_layers"],
        hidden_size=facts["hidden_size"],
        num_attention_heads=facts["num_attention_heads"],
        num_query_groups=facts.get("num_key_value_heads") or facts["num_attention_heads"],
        kv_channels=facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"],
        ffn_hidden_size=facts["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=facts["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=kind in ("qwen2", "qwen2_moe"),
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype if stages > 1 else None,
        # In one batch, the messages of an interleaved schedule between two stages could be taken for each other.
        overlap_p2p_comm=_virtual_stages(settings) is not None,
        batch_p2p_comm=_virtual_stages(settings) is None,
        moe_token_dispatcher_type=settings.get("moe_token_dispatcher_type") or "alltoall",
        # Initialisation also marks parameters as cut, without which the optimizer's norm misses other ranks' shards.
        perform_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        mtp_num_layers=settings.get("mtp_num_layers") or None,
        **_parallel_fields(settings),
        **_expert_fields(facts, settings),
    )
    if kind != "deepseek_v3":
        return TransformerConfig(**fields)
    return MLATransformerConfig(**fields | _latent_fields(facts))


def _check_family(facts: Facts) -> None:
    kind = facts["model_type"]
    if kind not in MEGATRON_TYPES:
        raise ValueError(
            f"policy.model_name: model_type {kind} has no Megatron trainer, allowed: {', '.join(MEGATRON_TYPES)}"
        )
    if obstacle := megatron_obstacle(facts):
        raise ValueError(f"policy.model_name: a model with {obstacle} has no Megatron trainer")


def _rotary_arguments(facts: Facts) -> dict[str, Any]:
    """Of the model's rotary embedding, which latent attention does not use."""
    rope = rope_parameters(facts)
    scaled = rope["rope_type"] == "llama3"
    return dict(rotary_base=rope["rope_theta"], rope_scaling=scaled, rope_scaling_factor=rope.get("factor") or 1.0)


def _parallel_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``policy.megatron_cfg`` that Megatron knows by the same name."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "expert_model_parallel_size",
        "sequence_parallel",
    )
    fields = {name: settings[name] for name in names if settings.get(name) is not None}
    fields["expert_tensor_parallel_size"] = settings.get("expert_tensor_parallel_size") or 1
    fields["virtual_pipeline_model_parallel_size"] = _virtual_stages(settings)
    return fields


def _expert_fields(facts: Facts, settings: Mapping[str, Any]) -> dict[str, Any]:
    experts = next(
        (facts[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if facts.get(key)), 0
    )
    if not experts:
        return {}
    fields = dict(
        num_moe_experts=experts,
        moe_ffn_hidden_size=facts.get("moe_intermediate_size") or facts["intermediate_size"],
        moe_router_topk=facts["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_router_pre_softmax=facts.get("norm_topk_prob") is False,
        moe_grouped_gemm=has_transformer_engine(),
        moe_layer_freq=_expert_layers(facts),
    )
    if facts["model_type"] == "qwen2_moe":
        fields |= dict(
            moe_shared_expert_intermediate_size=facts["shared_expert_intermediate_size"], moe_shared_expert_gate=True
        )
    if facts["model_type"] == "deepseek_v3":
        fields |= dict(
            moe_shared_expert_intermediate_size=facts["n_shared_experts"] * facts["moe_intermediate_size"],
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
            moe_router_num_groups=facts["n_group"],
            moe_router_group_topk=facts["topk_group"],
            moe_router_topk_scaling_factor=facts["routed_scaling_factor"],
            moe_router_pre_softmax=False,
        )
    return fields


def _expert_layers(facts: Facts) -> list[int]:
    """1 for every decoder layer with experts."""
    layers = range(facts["num_hidden_layers"])
    if facts["model_type"] == "deepseek_v3":
        return [int(layer >= facts["first_k_dense_replace"]) for layer in layers]
    step, dense = facts.get("decoder_sparse_step") or 1, facts.get("mlp_only_layers") or ()
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]


def _latent_fields(facts: Facts) -> dict[str, Any]:
    rope = rope_parameters(facts)
    fields = dict(
        multi_latent_attention=True,
        q_lora_rank=facts["q_lora_rank"],
        kv_lora_rank=facts["kv_lora_rank"],
        qk_head_dim=facts["qk_nope_head_dim"],
        qk_pos_emb_head_dim=facts["qk_rope_head_dim"],
        v_head_dim=facts["v_head_dim"],
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=rope["rope_theta"],
    )
    if rope["rope_type"] == "yarn":
        fields |= dict(
            rope_type="yarn",
            rotary_scaling_factor=rope["factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
            beta_fast=rope.get("beta_fast") or 32,
            beta_slow=rope.get("beta_slow") or 1,
            mscale=rope.get("mscale") or 1.0,
            mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        )
    return fields
