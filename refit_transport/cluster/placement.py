"""Ray start-up and placement groups. What was asked for is compared with what there is before anything waits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from .errors import ClusterError
from .layout import ClusterLayout

CPU_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Defaults for actors on a machine without GPUs; a variable that the user set wins."""

WORKER_ENV = {"HF_HUB_OFFLINE": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def resolve_device(wanted: str) -> str:
    """``cpu`` or ``cuda`` for ``cluster.device``. Raises ClusterError when GPUs are asked for and there are none."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and found == "cpu":
        raise ClusterError("cluster.device is cuda, but torch sees no GPU on this machine; set it to cpu or auto")
    return found if wanted == "auto" else wanted


def worker_env(device: str) -> dict[str, str]:
    """Environment of every actor."""
    wanted = WORKER_ENV | (CPU_WORKER_ENV if device == "cpu" else {})
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


@contextmanager
def ray_cluster(layout: ClusterLayout, device: str) -> Iterator[None]:
    """A Ray cluster for the block: the one in ``RAY_ADDRESS``, else a private one on this machine, shut down at the
    end."""
    shared = bool(os.environ.get("RAY_ADDRESS"))
    if shared:
        ray.init(log_to_driver=False, logging_level="error")
    else:
        slots = None if device == "cuda" else layout.world_size
        ray.init(
            num_cpus=slots, include_dashboard=False, log_to_driver=False, logging_level="error",
            object_store_memory=256 << 20 if slots else None,
        )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def place(layout: ClusterLayout, device: str, timeout: float) -> tuple[PlacementGroup, list[PlacementGroup]]:
    """One placement group for the trainers (a bundle a rank) and one per engine core. Raises ClusterError at once when
    the cluster is too small, and after ``timeout`` seconds when it does not place them."""
    resource = "GPU" if device == "cuda" else "CPU"
    available = int(ray.cluster_resources().get(resource, 0))
    if available < layout.world_size:
        raise ClusterError(
            f"{layout.world_size} {resource} slots are needed ({layout}); the Ray cluster has {available}"
        )
    trainers = placement_group([{resource: 1}] * layout.trainer_ranks, strategy="PACK")
    engines = [placement_group([{resource: core.shape.core_ranks}], strategy="STRICT_PACK") for core in layout.cores]
    for group in (trainers, *engines):
        if not group.wait(timeout):
            for made in (trainers, *engines):
                remove_placement_group(made)
            raise ClusterError(
                f"{resource} slots were not granted within {timeout:g} s: free {ray.available_resources()}, wanted "
                f"{group.bundle_specs}"
            )
    return trainers, engines


def actor_options(
    group: PlacementGroup, bundle: int, slots: int, device: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Options of an actor that takes ``slots`` of ``bundle``."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    on_gpu = device == "cuda"
    return {
        "num_gpus": slots if on_gpu else 0,
        "num_cpus": 0 if on_gpu else slots,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        "runtime_env": {"env_vars": worker_env(device) | dict(env or {})},
    }
