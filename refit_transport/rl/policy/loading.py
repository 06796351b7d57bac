"""Loads a Hugging Face checkpoint into a model that is sharded over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from refit_transport.rl.policy.parallel import ParallelSizes, fsdp_policies, shard_layers
from refit_transport.rl.policy.tensor_parallel import Meshes, cut_tensors, shard_dispatched_experts
from refit_transport.trainers.checkpoint_names import CheckpointTensor
from refit_transport.trainers.dtensor_load import CheckpointFiles, allocate, load_shards, parameters_without_memory
from refit_transport.trainers.tied_names import distinct_tensors

logger = logging.getLogger(__name__)

Wrap = Callable[[nn.Module], nn.Module]


def load_sharded(
    config: Mapping[str, Any], sizes: ParallelSizes, device: torch.device, wrap: Wrap | None = None
) -> nn.Module:
    """The causal language model of ``config["model_name"]`` (a local directory) with float32 parameters, sharded.

    ``wrap`` turns it into the module that is sharded (adapters, a value head); modules it adds have a method
    ``reset_new_parameters``. Tensor and expert parallelism follow the model's own plans; FSDP2, or HSDP, cuts every
    layer of what they leave.
    """
    files = CheckpointFiles(config["model_name"])
    language_model, written = _build(config, files, device)
    _configure(language_model, config)
    meshes = Meshes.of(sizes, device)
    cut_tensors(language_model, sizes, meshes)
    model = wrap(language_model) if wrap else language_model
    shard_dispatched_experts(model, sizes, meshes, fsdp_policies(config))
    shard_layers(model, meshes.fsdp(), config)
    if written:
        offload = (config.get("dtensor_cfg") or {}).get("cpu_offload")
        allocate(model, torch.device("cpu") if offload else device)
        state = language_model.state_dict(keep_vars=True)
        load_shards(files, written, {name: t for name, t in state.items() if not t.is_meta})
    for module in model.modules():
        if hasattr(module, "reset_new_parameters"):
            module.reset_new_parameters()
    return model


def _build(
    config: Mapping[str, Any], files: CheckpointFiles, device: torch.device
) -> tuple[nn.Module, list[CheckpointTensor]]:
    """The model without memory, and the tensors to read into it once it is sharded; or, where the files do not hold
    just those tensors (a legacy format), the loaded model and nothing to read."""
    path = config["model_name"]
    settings = _model_settings(config)
    auto_class = _auto_class(settings)
    with parameters_without_memory():
        model = auto_class.from_config(settings, dtype=torch.float32)
    written, _ = distinct_tensors(model, model.state_dict(keep_vars=True))
    if files.has_all(written):
        return model, written
    logger.info("%s: names differ from those of %s; every rank reads the whole checkpoint", path, type(model).__name__)
    model = auto_class.from_pretrained(path, config=settings, dtype=torch.float32, local_files_only=True)
    return model.to(device), []


def _model_settings(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    overrides = config.get("hf_config_overrides") or {}
    return AutoConfig.from_pretrained(config["model_name"], local_files_only=True, **overrides)


def _auto_class(settings: Any) -> Any:
    """Causal language models; a vision-language model is loaded whole, and trained on text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text_only = settings.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if text_only else AutoModelForImageTextToText


def _configure(model: nn.Module, config: Mapping[str, Any]) -> None:
    model.config.use_cache = False
    if (config.get("dtensor_cfg") or {}).get("activation_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
