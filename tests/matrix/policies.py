"""Tiny policies of the matrix: a transformers model with random float32 weights, and the checkpoint that it saves."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache

import torch
import transformers

from refit_transport.planning.presets.models import Model, model_from_config
from tests.models import read_checkpoint

SIZES = dict(
    vocab_size=290,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=64,
)
EXPERT_SIZES = dict(moe_intermediate_size=20, num_experts=8, num_experts_per_tok=2)
"""No size divides by three; 290 rows are padded by every engine; four ranks outnumber the key-value heads."""

NAMES = ("dense", "dense tied", "experts", "experts tied")


@dataclass(frozen=True, eq=False)
class Policy:
    """The model before any parallelism, and what ``save_pretrained`` wrote of it."""

    module: torch.nn.Module
    checkpoint: dict[str, torch.Tensor]
    """float32, by checkpoint name; a tied head is not in it."""
    preset: Model
    """The same model as its configuration describes it."""

    @property
    def has_experts(self) -> bool:
        return self.preset.experts > 0


@cache
def policy(name: str) -> Policy:
    """A policy of ``NAMES``, the same in every process of a run."""
    kind, sizes = ("Qwen3Moe", SIZES | EXPERT_SIZES) if "experts" in name else ("Qwen3", SIZES)
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings="tied" in name)
    torch.manual_seed(7)
    module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        checkpoint = {tensor: value.clone() for tensor, value in read_checkpoint(folder).items()}
    return Policy(module, checkpoint, model_from_config(name, config.to_dict(), "the matrix"))
