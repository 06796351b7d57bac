"""`refit-transport plan`: what a refit would move and how long it would take, without any GPU or process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refit_transport.cli import UsageError

if TYPE_CHECKING:
    from refit_transport.planning.presets.models import Model
    from refit_transport.report.plan_study import Job, Study

DEFAULT_CLUSTER = "dgx-h100"
EXAMPLE = """examples:
  refit-transport plan --model deepseek-v3 --train pp=16,ep=16 --gen tp=32,dp=8 --cluster dgx-h100
  refit-transport plan --model path/to/config.json --train fsdp=8 --gen tp=4,dp=2 --html plan.html
  refit-transport plan --config recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml --json -"""


def add_parser(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    """Arguments of the plan."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary}.", epilog=EXAMPLE,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    what = parser.add_argument_group("what to plan: a recipe, or a model with both layouts")
    what.add_argument("--config", metavar="RECIPE", help="take model, layouts and options from a recipe")
    what.add_argument("--model", help="a preset (--list names them), or a config.json or its folder")
    what.add_argument("--train", metavar="SIZES", help="tp=,pp=,ep=,etp=,vpp=,dp=,cp= as in Megatron, or fsdp=,tp=,dp=")
    what.add_argument("--gen", metavar="SIZES", help="tp=,pp=,ep=,dp= of the engines; dp counts engines")
    what.add_argument(
        "--cluster", help=f"a preset or a YAML file (default: {DEFAULT_CLUSTER}; a recipe knows CPU hosts)"
    )
    what.add_argument("--colocated", action="store_true", help="trainers and engines share their ranks")
    what.add_argument("--scope", choices=("ffn", "all"), help="only this scope of nccl_reshard (default: both)")
    what.add_argument(
        "--bucket-mib", type=int, metavar="MiB", help="most bytes a rank stages per bucket (default: 256)"
    )
    show = parser.add_argument_group("what to show (default: tables)")
    show.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output, without tables")
    show.add_argument("--html", metavar="FILE", help="write one self-contained page")
    show.add_argument("--list", action="store_true", help="list the models and clusters known by name")
    show.add_argument(
        "--reference", nargs="?", const="table", choices=("table", "markdown"),
        help="print predictions beside published measurements (plans five large models: a minute or two)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Plan, predict, and show it as asked."""
    if args.list:
        return _list()
    if args.reference:
        from refit_transport.report.plan_reference import print_reference

        print_reference(markdown=args.reference == "markdown")
        return 0
    from refit_transport.report.plan_study import SCOPES, JobError, study

    job = job_from(args)
    try:
        found = study(job, (args.scope,) if args.scope else SCOPES)
    except JobError as error:
        raise UsageError(str(error)) from None
    return _show(found, args)


def job_from(args: argparse.Namespace) -> Job:
    """The job that the arguments describe. Raises UsageError with every violation, one per line."""
    from dataclasses import replace

    from refit_transport.report.plan_study import Job

    found: list[str] = []
    if args.config and (args.model or args.train or args.gen):
        found.append("--config already says what --model, --train and --gen say; give one or the other")
    if args.bucket_mib is not None and args.bucket_mib < 1:
        found.append(f"--bucket-mib must be at least 1, got {args.bucket_mib}")
    recipe = _collect(found, lambda: _recipe(args.config)) if args.config else None
    if recipe is None:
        recipe = _from_sizes(args, found) if not args.config else {}
    name = args.cluster or recipe.get("cluster") or DEFAULT_CLUSTER
    from refit_transport.planning.presets.clusters import load_cluster

    cluster = _collect(found, lambda: load_cluster(name))
    found += _misfits(recipe)
    if found:
        raise UsageError("\n".join(["the plan cannot be made:", *found]))
    job = Job(
        recipe["model"], recipe["training"], recipe["generation"], cluster, recipe["colocated"], recipe["options"],
        recipe.get("notes", ()),
    )  # fmt: skip
    if not args.cluster and not recipe.get("cluster"):
        job = replace(job, notes=(f"No --cluster was given: {DEFAULT_CLUSTER} is assumed.", *job.notes))
    if args.bucket_mib:
        job = replace(job, options=replace(job.options, bucket_bytes=args.bucket_mib << 20))
    return job


def model_named(name: str) -> Model:
    """A preset, a built-in tiny model, the last part of a repository's name, or a configuration on this machine."""
    from refit_transport.config.tiny_models import TINY_MODELS
    from refit_transport.planning.presets.models import (
        MODELS,
        UnknownArchitectureError,
        load_model,
        model_from_config,
    )

    if name in TINY_MODELS:
        return model_from_config(name, TINY_MODELS[name], "built in")
    last = name.rsplit("/", 1)[-1].lower()
    try:
        return load_model(last if last in MODELS and not Path(name).exists() else name)
    except UnknownArchitectureError:
        return _from_transformers(Path(name))


def _from_transformers(path: Path) -> Model:
    """A model that only transformers knows, cut by the names that most architectures share."""
    from refit_transport.cli_classify import model_parameters
    from refit_transport.planning.presets.by_name import tensors_by_name
    from refit_transport.planning.presets.models import Model

    parameters, source = model_parameters(str(path))
    file = path / "config.json" if path.is_dir() else path
    config = json.loads(file.read_text())
    tensors = tensors_by_name(parameters, config.get("text_config") or config)
    return Model(file.parent.name, config, source, ("how tensors are cut is guessed from their names",), tensors)


def _from_sizes(args: argparse.Namespace, found: list[str]) -> dict[str, Any]:
    from refit_transport.planning.plan import PlanOptions
    from refit_transport.planning.presets.parallel import Generation, Training, read_layout

    for option in ("model", "train", "gen"):
        if getattr(args, option) is None:
            found.append(f"--{option} is missing (or give --config)")
    return {
        "model": _collect(found, lambda: model_named(args.model)) if args.model else None,
        "training": _collect(found, lambda: read_layout(args.train, Training, "--train")) if args.train else None,
        "generation": _collect(found, lambda: read_layout(args.gen, Generation, "--gen")) if args.gen else None,
        "colocated": args.colocated,
        "options": PlanOptions(),
    }


def _recipe(path: str) -> dict[str, Any]:
    """Model, layouts, cluster and options of a recipe."""
    from omegaconf import OmegaConf

    from refit_transport.config import InvalidConfigError, load_valid
    from refit_transport.config.setup import Setup

    try:
        config = load_valid(path)
    except InvalidConfigError as error:
        raise UsageError(str(error)) from None
    setup = Setup(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    return {
        "model": model_named(setup.get("policy.model_name")),
        "training": _training(setup),
        "generation": _generation(setup),
        "cluster": "cpu-host" if setup.get("cluster.device") == "cpu" else None,
        "colocated": setup.colocated,
        "options": _options(setup),
        "notes": tuple(_not_shown(setup)),
    }


def _not_shown(setup: Any) -> Iterator[str]:
    """What of a recipe's trainer the plan leaves out."""
    from refit_transport.config.pipeline_layout import STAGE_LAYERS, STAGE_SHARES

    if setup.trainer == "dtensor":
        if (expert := setup.get("policy.dtensor_cfg.expert_parallel_size")) > 1:
            yield f"policy.dtensor_cfg.expert_parallel_size {expert} is not shown: experts are cut as all is."
        return
    cfg = setup.get("policy.megatron_cfg")
    if any(cfg[name] for name in ("pipeline_model_parallel_layout", *STAGE_LAYERS, *STAGE_SHARES)):
        yield "Stages are shown with equal numbers of layers, unlike policy.megatron_cfg's."


def _training(setup: Any) -> Any:
    from refit_transport.planning.presets.parallel import Training

    if setup.trainer == "dtensor":
        replicas = setup.get("policy.dtensor_cfg.dp_replicate_size") or 1
        return Training(tp=setup.tensor_parallel, dp=replicas, fsdp=setup.data_parallel // replicas)
    cfg = setup.get("policy.megatron_cfg")
    context = cfg.get("context_parallel_size") or 1
    return Training(
        tp=cfg["tensor_model_parallel_size"], pp=cfg["pipeline_model_parallel_size"], cp=context,
        ep=cfg.get("expert_model_parallel_size") or 1, etp=cfg.get("expert_tensor_parallel_size") or 1,
        vpp=cfg.get("virtual_pipeline_model_parallel_size") or 1, dp=max(1, setup.data_parallel // context),
    )  # fmt: skip


def _generation(setup: Any) -> Any:
    from refit_transport.planning.presets.parallel import Generation

    if len(set(setup.engines)) > 1:
        shapes = ", ".join(map(str, setup.engines))
        raise UsageError(f"policy.generation.replicas: found engines of {shapes}; a plan is shown for equal ones only")
    shape = setup.engines[0] if setup.engines else setup.engine_shape
    ranks = setup.generation_ranks or setup.world
    return Generation(tp=shape.tensor, pp=shape.pipeline, ep=shape.expert, dp=max(1, ranks // shape.core_ranks))


def _options(setup: Any) -> Any:
    from refit_transport.transports.registry import get_transport

    given = setup.get(f"policy.generation.refit_cfg.{setup.transport}") or {}
    return get_transport(setup.transport).plan_options(given)


def _misfits(recipe: dict[str, Any]) -> list[str]:
    from refit_transport.planning.presets.layouts import misfits

    sides = [recipe.get(key) for key in ("model", "training", "generation")]
    return misfits(*sides) if all(sides) else []


def _collect(found: list[str], make: Callable[[], Any]) -> Any:
    """What ``make`` returns; its complaint goes into ``found`` instead."""
    try:
        return make()
    except ValueError as error:
        found.extend(str(error).splitlines())
    return None


def _show(found: Study, args: argparse.Namespace) -> int:
    from refit_transport.report.plan_json import summary
    from refit_transport.report.plan_page import write_page

    try:
        if args.json and args.json != "-":
            Path(args.json).write_text(json.dumps(summary(found), indent=2) + "\n", encoding="utf-8")
        if args.html:
            write_page(found, args.html)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from None
    if args.json == "-":
        print(json.dumps(summary(found), indent=2))
        return 0
    for path in filter(None, (args.json, args.html)):
        print(f"wrote {path}")
    if not args.json and not args.html:
        from refit_transport.report.plan_table import print_study

        print_study(found)
    return 0


def _list() -> int:
    from rich.console import Console
    from rich.table import Table

    from refit_transport.planning.presets import CLUSTERS, MODELS
    from refit_transport.report.plan_units import count, size

    models = Table("model", "tensors", "bytes", "source", title="Models", title_justify="left")
    for model in MODELS.values():
        models.add_row(model.name, count(len(model.tensors)), size(model.nbytes), model.source)
    clusters = Table("cluster", "domain", "port", "fast link", "source", title="Clusters", title_justify="left")
    for c in CLUSTERS.values():
        clusters.add_row(
            c.name, f"{c.domain_ranks} ranks", f"{size(c.nic_rate)}/s", f"{size(c.domain_rate)}/s", c.source
        )
    console = Console()
    console.print(models, clusters)
    return 0
