"""`refit-transport classify`: which tensors of a model take the reshard path, with parameters, bytes and shares."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from refit_transport.cli import UsageError

if TYPE_CHECKING:
    from refit_transport.layout.layout import LogicalParameter
    from refit_transport.planning.classify import Classification

PATH_NAMES = ("reshard", "broadcast")


def add_parser(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    """Arguments of the table."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary}.")
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, config.json, or a preset's name")
    parser.add_argument("--names", action="store_true", help="one line per tensor instead of the summary")


def run(args: argparse.Namespace) -> int:
    """Print the summary, or every name."""
    from refit_transport.planning.classify import PREDICTION, classify

    parameters, source = model_parameters(args.model)
    found = classify(parameters)
    print(f"{args.model}: {len(parameters)} tensors, from {source}")
    print(_names(parameters, found) if args.names else _table(parameters, found))
    if drafts := [name for name, verdict in found.verdicts.items() if verdict.kind == PREDICTION]:
        print(f"{len(drafts)} tensors of {PREDICTION} are sent to engines that draft with them, and left out elsewhere")
    return 0


def model_parameters(model: str) -> tuple[list[LogicalParameter], str]:
    """Checkpoint tensors of a model, and where they were read: a checkpoint's own headers where there is one, else the
    shapes that its configuration implies. Raises UsageError for something that is neither."""
    from refit_transport.config.checkpoint_headers import read_headers
    from refit_transport.config.tiny_models import TINY_MODELS
    from refit_transport.planning.presets.models import (
        ModelError,
        UnknownArchitectureError,
        load_model,
        model_from_config,
    )

    folder = Path(model)
    if folder.is_dir() and (parameters := read_headers(folder)):
        return parameters, "the headers of its safetensors files"
    try:
        if model in TINY_MODELS:
            loaded = model_from_config(model, TINY_MODELS[model], "built in")
        else:
            loaded = load_model(model)
    except UnknownArchitectureError:
        return _from_transformers(folder), "the model class that transformers builds for its configuration"
    except ModelError as error:
        raise UsageError(str(error).removeprefix("--model: ")) from None
    return [tensor.parameter for tensor in loaded.tensors], f"the shapes that {loaded.source} implies"


def _from_transformers(path: Path) -> list[LogicalParameter]:
    """Names and shapes of a model built without memory, for architectures that no preset covers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from refit_transport.layout.layout import LogicalParameter
    from refit_transport.trainers.tied_names import distinct_tensors

    try:
        config = AutoConfig.from_pretrained(path if path.is_dir() else path.parent)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(f"transformers cannot build {path}: {error}") from None
    tensors, _ = distinct_tensors(model, model.state_dict(keep_vars=True))
    return [LogicalParameter(t.name, t.shape, str(t.dtype).removeprefix("torch.")) for t in tensors]


def _table(parameters: list[LogicalParameter], found: Classification) -> str:
    rows = found.rows(parameters)
    total = sum(row.bytes for row in rows) or 1
    lines = [f"{'path':9}  {'kind':32}  {'tensors':>8}  {'parameters':>12}  {'bytes':>10}  {'share':>7}"]
    for row in rows:
        lines.append(
            f"{PATH_NAMES[row.route]:9}  {row.kind:32}  {row.tensors:8d}  {_count(row.elements):>12}  "
            f"{_bytes(row.bytes):>10}  {row.bytes / total:7.2%}"
        )
    for route, name in enumerate(PATH_NAMES):
        part = [row for row in rows if row.route == route]
        lines.append(
            f"{name:9}  {'total':32}  {sum(r.tensors for r in part):8d}  {_count(sum(r.elements for r in part)):>12}  "
            f"{_bytes(sum(r.bytes for r in part)):>10}  {sum(r.bytes for r in part) / total:7.2%}"
        )
    return "\n".join(lines)


def _names(parameters: list[LogicalParameter], found: Classification) -> str:
    lines = []
    for parameter in parameters:
        verdict = found.verdicts[parameter.name]
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        what = f"{verdict.kind}: {verdict.reason}"
        lines.append(f"{PATH_NAMES[verdict.route]:9}  {parameter.name}  {shape} {parameter.dtype}  {what}")
    return "\n".join(lines)


def _count(elements: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if elements >= size:
            return f"{elements / size:.2f} {unit}"
    return str(elements)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
