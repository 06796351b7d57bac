"""All tensors of one model chunk: which layer each belongs to, and what it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from refit_transport.layout.region import LayoutError

from . import attention, feed_forward, mamba
from .fusion import Fused, Held, Part, boxes, replicated, rows
from .groups import tensor_groups
from .layer_context import Composed, LayerContext
from .names import CheckpointNames

_LAYER_RULES = [
    (re.compile(pattern), rule) for pattern, rule in (attention.RULES | feed_forward.RULES | mamba.RULES).items()
]


class Chunk:
    """One chunk of the pipeline, as Megatron built it; ``vocabulary`` is the number of rows in the checkpoint."""

    def __init__(self, model: nn.Module, names: CheckpointNames, vocabulary: int) -> None:
        self.model = unwrapped(model)
        self._names, self._vocabulary = names, vocabulary
        self._groups = tensor_groups(self.model)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weights."""
        return bool(self.model.share_embeddings_and_output_weights)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by Megatron name. Raises LayoutError for one that is no plain tensor."""
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for prefix, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer.detach()
        for name, tensor in found.items():
            if type(tensor) is not torch.Tensor:
                raise LayoutError(f"{name}: is stored as {type(tensor).__name__}, allowed is a plain tensor")
        return found

    def held(self, name: str, tensor: torch.Tensor) -> Iterator[Held]:
        """The boxes of the checkpoint that the tensor stores. Raises LayoutError naming what has no place in it."""
        partition = getattr(self._parameter(name), "partition_dim", -1)
        for view, fused in self._composed(name, tensor):
            group = self._groups.expert if fused.expert else self._groups.dense
            cut = view.shape[fused.axis] != fused.total
            if cut and view is tensor and partition not in (-1, fused.axis):
                raise LayoutError(f"{name}: is cut along dimension {partition}, expected was {fused.axis}")
            yield from boxes(fused, view, group, name)

    def _parameter(self, name: str) -> torch.Tensor:
        path, _, attribute = name.rpartition(".")
        return getattr(self.model.get_submodule(path), attribute)

    def _composed(self, name: str, tensor: torch.Tensor) -> Composed:
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            layer = self.model.decoder.layers[int(match[1])]
            return self._in_layer(name, match[2], layer, layer.layer_number - 1, tensor)
        if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
            return self._prediction(name, match[2], self.model.mtp.layers[int(match[1])], tensor)
        if name not in _MODEL_RULES:
            raise _unknown(name)
        return [(tensor, _MODEL_RULES[name](self, tensor))]

    def _in_layer(self, full: str, name: str, layer: nn.Module, index: int, tensor: torch.Tensor) -> Composed:
        for pattern, rule in _LAYER_RULES:
            if match := pattern.fullmatch(name):
                return rule(LayerContext(layer, self._names.layer(index), self._names), match, tensor)
        raise _unknown(full)

    def _prediction(self, full: str, name: str, module: nn.Module, tensor: torch.Tensor) -> Composed:
        """Multi-token-prediction layers count on where the decoder's end."""
        if not self._names.mtp:
            raise LayoutError(f"{full}: the family's checkpoints have no name for multi-token-prediction layers")
        index = module.config.num_layers + module.layer_number - 1
        prefix = self._names.layer(index)
        if match := re.fullmatch(r"(transformer_layer|mtp_model_layer)\.(.+)", name):
            return self._in_layer(full, match[2], getattr(module, match[1]), index, tensor)
        if name == "eh_proj.weight":
            return [(tensor, rows(f"{prefix}.{name}", module.config.hidden_size))]
        norms = {"enorm.weight": "enorm", "hnorm.weight": "hnorm", "final_layernorm.weight": "shared_head.norm"}
        if name not in norms:
            raise _unknown(full)
        return [(tensor, replicated(f"{prefix}.{norms[name]}.weight", tensor.shape[0]))]

    def _padded(self, name: str, local: torch.Tensor) -> Fused:
        """Rows of the vocabulary; those that pad it have no place in the checkpoint."""
        padding = local.shape[0] * self._groups.dense.size - self._vocabulary
        if padding < 0:
            raise LayoutError(f"{name}: the model has {-padding} rows fewer than the {self._vocabulary} of vocab_size")
        return Fused(0, (Part(name, 0, self._vocabulary), Part(None, 0, padding)))

    def _embedding(self, local: torch.Tensor) -> Fused:
        return self._padded(f"{self._names.root}.{self._names.embedding}.weight", local)

    def _output(self, local: torch.Tensor) -> Fused:
        return self._embedding(local) if self.tied else self._padded("lm_head.weight", local)

    def _final_norm(self, local: torch.Tensor) -> Fused:
        return replicated(f"{self._names.root}.{self._names.final_norm}.weight", local.shape[0])


_MODEL_RULES: dict[str, Callable[[Chunk, torch.Tensor], Fused]] = {
    "embedding.word_embeddings.weight": Chunk._embedding,
    "output_layer.weight": Chunk._output,
    "decoder.final_layernorm.weight": Chunk._final_norm,
    "decoder.final_norm.weight": Chunk._final_norm,
}


def unwrapped(model: Any) -> nn.Module:
    """The model inside DDP and mixed-precision wrappers."""
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model


def _unknown(name: str) -> LayoutError:
    return LayoutError(f"{name}: no rule says where this Megatron tensor is in the Hugging Face checkpoint")
