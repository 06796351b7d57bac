"""Tiny models with random weights, written as Hugging Face checkpoints with a byte-level tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 290
"""Rows of the embedding: 256 bytes, ``<pad>``, ``<eos>`` and unused rows. No multiple of 64, so engines pad it."""

IMAGE_TOKENS = {"<image>": 258, "<fake_token_around_image>": 259, "<global-img>": 260, "<end_of_utterance>": 261}
"""Follow the bytes in the vocabulary of models that see."""

_DENSE = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
    initializer_range=0.15,
    tie_word_embeddings=False,
)
_QWEN2 = {key: value for key, value in _DENSE.items() if key != "head_dim"}
_QWEN_MOE = dict(_DENSE, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
_DEEPSEEK = dict(
    _DENSE,
    num_key_value_heads=4,
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    first_k_dense_replace=1,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    head_dim=64,
)
_NEMOTRON_H = dict(
    _DENSE,
    num_hidden_layers=4,
    layers_block_type=["mamba", "mlp", "attention", "mlp"],
    mamba_num_heads=8,
    mamba_head_dim=32,
    n_groups=2,
    ssm_state_size=16,
    conv_kernel=4,
    chunk_size=16,
)
_QWEN_NEXT = dict(
    _QWEN_MOE,
    layer_types=["linear_attention", "full_attention"],
    shared_expert_intermediate_size=64,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
)
_VISION = dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    out_hidden_size=128,
    fullatt_block_indexes=[1],
    patch_size=14,
)
_SIGLIP = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
_QWEN_VL_TEXT = dict(
    {key: value for key, value in _DENSE.items() if key != "head_dim"},
    rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
)

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DENSE),
    "qwen3_tied": ("Qwen3Config", "Qwen3ForCausalLM", dict(_DENSE, tie_word_embeddings=True)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _QWEN2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DENSE),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _QWEN_MOE),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(_DENSE, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(
            _DENSE,
            head_dim=64,
            intermediate_size=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", _NEMOTRON_H),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _QWEN_NEXT),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        dict(text_config=_QWEN_VL_TEXT, vision_config=_VISION, tie_word_embeddings=False),
    ),
    "idefics3": (
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        dict(
            text_config=dict(_DENSE, model_type="llama"),
            vision_config=_SIGLIP,
            image_token_id=IMAGE_TOKENS["<image>"],
            scale_factor=2,
            tie_word_embeddings=False,
            pad_token_id=0,
        ),
    ),
}
"""Family to transformers' configuration class, model class, and configuration."""


def make_model(family: str, path: str | Path, seed: int, dtype: str = "bfloat16", **overrides: Any) -> Path:
    """Write a checkpoint of ``family`` with weights drawn from ``seed`` to ``path`` and return the path.

    ``overrides`` replace fields of the configuration. Two seeds give models that differ in every tensor, norms and
    buffers included. Raises KeyError for an unknown family.
    """
    import torch
    import transformers

    config_name, model_name, fields = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**fields, **overrides})
    model = getattr(transformers, model_name)(config)
    _make_every_tensor_random(model)
    path = Path(path)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    write_tokenizer(path, IMAGE_TOKENS if family == "idefics3" else {})
    if family == "idefics3":
        _write_image_processor(path)
    return path


def _write_image_processor(path: Path) -> None:
    """One image is one token: four patches of 14 x 14 pixels. The image processor that needs no torchvision."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"longest_edge": _SIGLIP["image_size"]}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(images, AutoTokenizer.from_pretrained(path), image_seq_len=1).save_pretrained(path)


def _make_every_tensor_random(model: Any) -> None:
    """Norms, biases and persistent buffers start out as constants: two seeds would give them equal values."""
    import torch

    persistent = model.state_dict().keys()
    with torch.no_grad():
        for parameter in model.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name in persistent and buffer.is_floating_point():
                buffer.normal_(0, 0.1)


def write_tokenizer(path: str | Path, special: Mapping[str, int] = MappingProxyType({})) -> None:
    """A byte-level tokenizer without merges: one token per byte, ``<pad>`` = 0, ``<eos>`` = 1, then ``special``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    vocabulary.update(special)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=list(special)
    ).save_pretrained(path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Every tensor of a checkpoint directory, by its name in the files."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors
