"""Checkpoints of target models with something that drafts for them: prediction layers, an EAGLE head, a small model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.models import make_model, read_checkpoint

HIDDEN, LAYERS = 128, 2
SPECULATION = {"num_speculative_tokens": 2}


@dataclass
class Drafted:
    """A target's checkpoint at ``path``, the engine options that add its draft, and what a trainer of both sends."""

    path: Path
    speculation: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def of_draft(self) -> frozenset[str]:
        """Names of ``tensors`` that only the draft could need."""
        return frozenset(n for n in self.tensors if n.startswith((f"model.layers.{LAYERS}.", "mtp.", "draft.")))


def deepseek_prediction(folder: Path, seed: int) -> Drafted:
    """The next layer, with its own copies of embedding and head, as published checkpoints have it."""
    path = make_model("deepseek_v3", folder, seed, num_nextn_predict_layers=1)
    return _with_layers(path, seed, f"model.layers.{LAYERS}.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj", True)


def qwen_next_prediction(folder: Path, seed: int) -> Drafted:
    path = make_model("qwen3_next", folder, seed)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    return _with_layers(path, seed, "mtp.", norms, "fc", False)


def _with_layers(path: Path, seed: int, prefix: str, norms: tuple[str, ...], joint: str, copies: bool) -> Drafted:
    """A prediction layer made of the last decoder layer, with other values, and what lies around it."""
    checkpoint = read_checkpoint(path)
    random = torch.Generator().manual_seed(seed + 100)
    last = f"model.layers.{LAYERS - 1}."
    inner = prefix if copies else f"{prefix}layers.0."
    added = {
        name.replace(last, inner): (tensor + torch.randn(tensor.shape, generator=random) * 0.1).to(tensor.dtype)
        for name, tensor in checkpoint.items()
        if name.startswith(last)
    }
    added.update({f"{prefix}{norm}.weight": _random(random, HIDDEN) for norm in norms})
    added[f"{prefix}{joint}.weight"] = _random(random, HIDDEN, 2 * HIDDEN)
    if copies:
        added[f"{prefix}embed_tokens.weight"] = checkpoint["model.embed_tokens.weight"].clone()
        added[f"{prefix}shared_head.head.weight"] = checkpoint["lm_head.weight"].clone()
    _write(path, {**checkpoint, **added})
    return Drafted(path, {"method": "mtp", **SPECULATION}, {**checkpoint, **added})


def eagle_head(folder: Path, seed: int) -> Drafted:
    """One decoder layer without its first norm, and the matrix before it. Embedding and head are the target's."""
    path = make_model("llama", folder / "target", seed)
    draft = make_model("llama", folder / "draft", seed + 10, num_hidden_layers=1)
    layers = {n.removeprefix("model."): t for n, t in read_checkpoint(draft).items() if n.startswith("model.layers.")}
    del layers["layers.0.input_layernorm.weight"]
    layers["fc.weight"] = _random(torch.Generator().manual_seed(seed + 100), HIDDEN, 2 * HIDDEN)
    _write(draft, layers)
    return _separate(path, draft, layers, "eagle")


def small_model(folder: Path, seed: int) -> Drafted:
    path = make_model("qwen3", folder / "target", seed)
    draft = make_model("qwen3", folder / "draft", seed + 10, num_hidden_layers=1)
    return _separate(path, draft, read_checkpoint(draft), "draft_model")


def _separate(path: Path, draft: Path, tensors: Mapping[str, torch.Tensor], method: str) -> Drafted:
    sent = {**read_checkpoint(path), **{f"draft.{name}": tensor for name, tensor in tensors.items()}}
    return Drafted(path, {"method": method, "model": str(draft), **SPECULATION}, sent)


def itself(folder: Path, seed: int) -> Drafted:
    """A second copy of the target drafts for it: every tensor is needed by both."""
    path = make_model("qwen3", folder, seed)
    return Drafted(path, {"method": "draft_model", "model": str(path), **SPECULATION}, read_checkpoint(path))


DRAFTS: dict[str, Callable[[Path, int], Drafted]] = {
    "deepseek_v3, mtp": deepseek_prediction,
    "qwen3_next, mtp": qwen_next_prediction,
    "llama, eagle": eagle_head,
    "qwen3, draft_model": small_model,
    "qwen3, itself": itself,
}


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * 0.2).bfloat16()


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    for index in path.glob("*.index.json"):
        raise AssertionError(f"{index}: a tiny model in several files")
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
