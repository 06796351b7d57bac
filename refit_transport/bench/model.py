"""The tensors of a model preset, scaled down by its configuration keys, and how the axes of a mesh place them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from refit_transport.planning.presets import MODELS, Model
from refit_transport.planning.presets.tensors import EMBEDDING, ModelTensor

if TYPE_CHECKING:
    from .config import Side

AXES = {
    "dp": "copies",
    "pp": "layers",
    "fsdp": "rows; whole experts, where the mesh has no axis for them",
    "ep": "experts",
    "tp": "what tensor parallelism cuts",
}
"""Axes that a mesh may have, the last one varying fastest, and what each of them spreads."""


def scaled(keys: Mapping[str, Any]) -> Model:
    """The preset that ``keys["preset"]`` names, all other keys put in the place of its configuration's own.

    Raises ValueError for an unknown preset or key, with what is allowed."""
    changes = dict(keys)
    preset = str(changes.pop("preset", None)).lower()
    if preset not in MODELS:
        raise ValueError(f"model.preset: got {keys.get('preset')!r}, allowed: {', '.join(MODELS)}")
    model = MODELS[preset]
    for key in changes:
        if key not in model.config:
            close = get_close_matches(key, model.config, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"model.{key}: not a key of {preset}{hint} Allowed: {', '.join(sorted(model.config))}")
    return replace(model, config={**model.config, **changes})


def violations(keys: Mapping[str, Any], sides: Mapping[str, Side]) -> Iterator[str]:
    """Everything that keeps a model from being placed on the meshes of ``sides``."""
    try:
        model = scaled(keys)
    except ValueError as error:
        yield str(error)
        return
    for key, side in sides.items():
        for axis in side.mesh.keys() - AXES.keys():
            yield f"{key}.mesh.{axis}: with a model, allowed: {', '.join(AXES)}"
        for axis, count in (("ep", model.experts), ("pp", model.layers)):
            if (size := side.mesh.get(axis, 1)) > 1 and (count == 0 or count % size):
                yield f"{key}.mesh.{axis}: got {size}, allowed: a divisor of {count}, the {AXES[axis]} of the model"
        if (size := side.mesh.get("tp", 1)) > 1 and (obstacle := _uncut(model, size)):
            yield f"{key}.mesh.tp: got {size}, but {obstacle}"


def _uncut(model: Model, size: int) -> str:
    """Why the first tensor that does not lie on ``size`` ranks, a box each, does not; empty when all do."""
    for tensor in model.tensors:
        if tensor.cut.parts:
            return f"{tensor.name} consists of parts that are cut one by one; allowed: 1"
        if tensor.cut.units % size:
            return f"{tensor.name} has {tensor.cut.units} heads; allowed: a divisor of that"
    return ""


def placed(
    model: Model, tensor: ModelTensor, side: Side
) -> tuple[dict[str, int | str], dict[str, int], dict[str, int]]:
    """Placement of a tensor in the terms of ``config.Tensors``: targets by axis, repeats, and its own index in each."""
    expert = tensor.expert >= 0
    spread: int | str = "expert" if expert and "ep" not in side.mesh else 0
    targets: dict[str, int | str | None] = {
        "pp": "layer",
        "fsdp": spread,
        "ep": "expert" if expert else None,
        "tp": tensor.cut.dim,
    }
    chosen = {axis: targets[axis] for axis in side.mesh if targets.get(axis) is not None}
    repeat = {"layer": model.layers, "expert": max(1, model.experts)}
    layer = tensor.layer if tensor.layer >= 0 else 0 if tensor.layer == EMBEDDING else model.layers - 1
    return chosen, repeat, {"layer": layer, "expert": max(0, tensor.expert)}
