"""Runs a recipe: places both sides on Ray, connects the refit session, drives the loop, reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from refit_transport.config.engine_shape import engine_cfgs
from refit_transport.report.log import run_log
from refit_transport.report.summary import RunSummary
from refit_transport.rl.run import run

from .awaiting import await_all
from .engine_args import engine_args
from .engine_group import EngineGroup
from .layout import cluster_layout
from .local_model import local_model
from .placement import place, ray_cluster, resolve_device
from .refit_coordinator import RefitCoordinator
from .session_options import session_options
from .trainer_group import RemotePolicy, RemoteValue, TrainerGroup

log = logging.getLogger("refit_transport")


@dataclass(frozen=True)
class Running:
    """Both sides, started and connected."""

    trainers: TrainerGroup
    engines: EngineGroup
    refit: RefitCoordinator


def run_grpo(config: DictConfig) -> RunSummary:
    """Run a validated GRPO configuration to its end. Raises ClusterError or RefitError when an actor is lost or a refit
    fails."""
    return _run(config, "grpo")


def run_ppo(config: DictConfig) -> RunSummary:
    """As ``run_grpo``, with a value model on the trainer ranks."""
    return _run(config, "ppo")


def _run(config: DictConfig, algorithm: str) -> RunSummary:
    from transformers import AutoTokenizer

    tree = OmegaConf.to_container(config, resolve=True)
    folder, console = run_folder(tree, algorithm), Console()
    with run_log(folder, console):
        localise(tree)
        tokenizer = AutoTokenizer.from_pretrained(tree["policy"]["tokenizer"]["name"])
        return _train(tree, config, folder, console, tokenizer, algorithm)


def _train(
    tree: dict[str, Any], config: DictConfig, folder: Path, console: Console, tokenizer: Any, algorithm: str
) -> RunSummary:
    with running(tree) as cluster:
        return run(
            tree,
            OmegaConf.to_yaml(config, resolve=True),
            folder,
            RemotePolicy(cluster.trainers),
            cluster.engines,
            cluster.refit,
            tokenizer,
            RemoteValue(cluster.trainers) if algorithm == "ppo" else None,
            console,
        )


def localise(tree: dict[str, Any]) -> None:
    """Names of models become directories. The tokenizer is the model's own unless it has another name."""
    cache = Path(tree["logger"]["log_dir"])
    for section in ("policy", "value"):
        if section in tree:
            name, tokenizer = tree[section]["model_name"], tree[section]["tokenizer"]
            tree[section]["model_name"] = str(local_model(tree[section], cache))
            if tokenizer["name"] in (None, name):
                tokenizer["name"] = tree[section]["model_name"]


@contextmanager
def running(tree: dict[str, Any]) -> Iterator[Running]:
    """Ray, trainers and engines of a resolved configuration, for the block. Actors are killed at its end."""
    layout = cluster_layout(tree)
    device = resolve_device(tree["cluster"]["device"])
    setup, step = tree["cluster"]["setup_timeout_s"], tree["cluster"]["step_timeout_s"]
    log.info("starting Ray for %d ranks on %s", layout.world_size, device)
    with ray_cluster(layout, device):
        trainer_group, engine_groups = place(layout, device, setup)
        trainers = TrainerGroup(layout, trainer_group, device, step)
        cfgs = engine_cfgs(tree["policy"]["generation"], layout.engine_ranks)
        engines = EngineGroup(layout, engine_groups, device, step, [cfg["env_vars"] for cfg in cfgs])
        try:
            log.info("building models on %s", layout)
            _start(tree, cfgs, trainers, engines, setup)
            refit = RefitCoordinator(trainers, engines, session_options(tree))
            refit.connect()
            try:
                yield Running(trainers, engines, refit)
            finally:
                refit.disconnect()
        finally:
            trainers.shutdown()
            engines.shutdown()


def _start(
    tree: dict[str, Any], cfgs: Sequence[dict[str, Any]], trainers: TrainerGroup, engines: EngineGroup, timeout: float
) -> None:
    """Build models on both sides at the same time. ``cfgs`` holds the ``vllm_cfg`` of each engine."""
    for side in (trainers, engines):
        pids = await_all(side.calls("pid"), "starting the actors", timeout)
        side.names = [f"{name} (pid {pid})" for name, pid in zip(side.names, pids, strict=True)]
    progress_bar = tree["policy"]["generation"]["vllm_cfg"]["use_tqdm"]
    calls = engines.start([engine_args(tree, cfg) for cfg in cfgs], progress_bar)
    calls += trainers.start(_worker_classes(tree), tree)
    await_all(calls, "building the models", timeout)
    if tree["loss_fn"]["reference_policy_kl_penalty"]:
        trainers.worker("keep_reference", doing="keeping the reference policy")


def _worker_classes(tree: dict[str, Any]) -> dict[str, type]:
    """The section of the configuration that each worker of a trainer rank is made from, and its class."""
    classes: dict[str, type] = {}
    if tree["policy"]["megatron_cfg"]["enabled"]:
        from refit_transport.rl.policy.megatron import MegatronPolicyWorker

        classes["policy"] = MegatronPolicyWorker
    else:
        from refit_transport.rl.policy.worker import PolicyWorker

        classes["policy"] = PolicyWorker
    if "value" in tree:
        from refit_transport.rl.policy.value import ValueWorker

        classes["value"] = ValueWorker
    return classes


def run_folder(tree: dict[str, Any], algorithm: str) -> Path:
    """``logger.log_dir``/``logger.run_name``, or a name made from the algorithm and the time."""
    name = tree["logger"]["run_name"] or f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(tree["logger"]["log_dir"]).resolve() / name
