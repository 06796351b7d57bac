"""What the cost model expects of each planned transport on an emulated cluster."""

from __future__ import annotations

import os
from dataclasses import replace

from refit_transport.planning.cost import predict as predict_plan
from refit_transport.planning.presets.clusters import CLUSTERS, Cluster

from .config import BenchConfig
from .methods.planned import OPTIONS, plan_of
from .netlab import WIRE_EFFICIENCY
from .workload import BenchTensor


def predict(config: BenchConfig, tensors: tuple[BenchTensor, ...]) -> dict[str, float]:
    """Seconds by transport, for those that have a plan."""
    cluster = emulated_cluster(config)
    sides = {"senders": config.trainers.ranks, "receivers": config.engines.ranks}
    return {
        name: predict_plan(plan_of(name, config, tensors), cluster, **sides).seconds
        for name in config.transports
        if name in OPTIONS
    }


def emulated_cluster(config: BenchConfig) -> Cluster:
    """The ``cpu-host`` preset with the cards of the lab. All ranks share this machine's cores, so each copies at its
    part of the preset's rate."""
    host = CLUSTERS["cpu-host"]
    node_ranks = max(map(len, config.cluster.domains))
    share = min(1.0, (os.cpu_count() or 1) / len(config.world))
    return replace(
        host,
        name=config.name,
        node_ranks=node_ranks,
        domain_ranks=node_ranks,
        node_ports=node_ranks if config.cluster.nic == "rank" else 1,
        nic_rate=config.cluster.bits_per_second / 8,
        network_efficiency=WIRE_EFFICIENCY,
        domain_rate=host.domain_rate * share,
        copy_rate=host.copy_rate * share,
    )
