"""Builds Megatron's Mamba hybrid for a NemotronH configuration, of Megatron's own layers."""

from __future__ import annotations

from typing import Any

import torch

LETTERS = {"mamba": "M", "linear_attention": "M", "mlp": "-", "attention": "*", "full_attention": "*", "moe": "E"}
"""Megatron's names of layers by those in ``config.json`` and in transformers."""


def build_hybrid(facts: dict[str, Any], tensor_parallel: int) -> torch.nn.Module:
    from megatron.core.activations import squared_relu
    from megatron.core.models.mamba import MambaModel
    from megatron.core.transformer import TransformerConfig

    pattern = "".join(LETTERS[kind] for kind in facts["layers_block_type"])
    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=facts["hidden_size"],
        num_attention_heads=facts["num_attention_heads"],
        num_query_groups=facts["num_key_value_heads"],
        kv_channels=facts["head_dim"],
        ffn_hidden_size=facts["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=facts["layer_norm_epsilon"],
        activation_func=squared_relu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        mamba_num_heads=facts["mamba_num_heads"],
        mamba_head_dim=facts["mamba_head_dim"],
        mamba_num_groups=facts["n_groups"],
        mamba_state_dim=facts["ssm_state_size"],
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        is_hybrid_model=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **(_experts(facts) if "E" in pattern else {}),
    )
    return MambaModel(
        config=config,
        mamba_stack_spec=_stack(facts),
        vocab_size=384,
        max_sequence_length=64,
        hybrid_override_pattern=pattern,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )


def _experts(facts: dict[str, Any]) -> dict[str, Any]:
    return dict(
        num_moe_experts=facts["n_routed_experts"],
        moe_ffn_hidden_size=facts["moe_intermediate_size"],
        moe_router_topk=facts["num_experts_per_tok"],
        moe_shared_expert_intermediate_size=facts["moe_shared_expert_intermediate_size"],
        moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=facts["routed_scaling_factor"],
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="allgather",
    )


def _stack(facts: dict[str, Any]) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm import mamba_block, mamba_layer, mamba_mixer
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def layer(module: type, **submodules: Any) -> ModuleSpec:
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**submodules))

    mixer = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = mamba_layer.MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=mamba_mixer.MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
    )
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    dense = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = get_moe_module_spec(use_te=False, num_experts=facts.get("n_routed_experts"), moe_grouped_gemm=False)
    feed_forward = dict(pre_mlp_layernorm=WrappedTorchNorm, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=mamba_layer.MambaLayer, submodules=mamba),
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
            mlp_layer=layer(MLPLayer, mlp=ModuleSpec(module=MLP, submodules=dense), **feed_forward),
            moe_layer=layer(TransformerLayer, mlp=experts, **feed_forward),
        ),
    )
