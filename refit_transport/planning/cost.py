"""Predicts how long a planned refit takes on a cluster, phase by phase, and what the cluster's links allow at best.

A bucket passes five phases, each on a resource of its own: pack, network, in-domain, unpack, load. Buckets follow each
other through them like a pipeline with ``IN_FLIGHT`` buckets in it. ``docs/planning.md`` derives every term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_transport.layout.layout import ITEMSIZE, SideDescription

from .cost_traffic import Traffic, measure
from .plan import IN_FLIGHT, Link, Plan
from .presets.clusters import Cluster

PHASES = ("pack", "network", "in_domain", "unpack", "load")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan costs on a cluster. Times are seconds, sizes are bytes."""

    seconds: float
    phase_seconds: dict[str, float]
    """Time that each phase's resource is busy, summed over buckets; phases overlap, so they do not add up."""
    timeline: np.ndarray
    """Start and end of every phase of every bucket, [buckets, phases, 2]."""
    network_bytes: int
    domain_bytes: int
    local_bytes: int
    busiest_send_over_mean: float
    busiest_recv_over_mean: float
    messages: int
    buckets: int
    peak_extra_bytes_per_rank: int
    limited_by: str
    traffic: Traffic


def predict(
    plan: Plan, cluster: Cluster, *, senders: Sequence[int], receivers: Sequence[int], overlap: bool = True
) -> Prediction:
    """Predict one refit by ``plan``.

    Args:
        senders, receivers: the trainer and the inference ranks, over which the means of the balance figures go.
        overlap: False for a system that runs the phases of a bucket, and buckets, strictly one after the other.
    """
    traffic = measure(plan)
    phases = _phase_times(plan, traffic, cluster, overlap)
    timeline = _pipeline(phases, traffic.kind, IN_FLIGHT if overlap else 1)
    busy = {phase: float(traffic.total(phases[phase]).max(initial=0)) for phase in PHASES}
    network_out, network_in = (traffic.total(table) for table in traffic.of_link(Link.NETWORK))
    return Prediction(
        seconds=float(timeline[-1, -1, 1]) if len(timeline) else 0.0,
        phase_seconds=busy,
        timeline=timeline,
        network_bytes=_total(traffic, Link.NETWORK),
        domain_bytes=_total(traffic, Link.DOMAIN),
        local_bytes=_total(traffic, Link.LOCAL),
        busiest_send_over_mean=_over_mean(network_out, senders),
        busiest_recv_over_mean=_over_mean(network_in, receivers),
        messages=round(float(traffic.total(traffic.messages_out).sum())),
        buckets=len(plan.buckets),
        peak_extra_bytes_per_rank=_peak_staged(traffic, overlap) + traffic.largest_whole,
        limited_by=_limit(busy, traffic, cluster, len(plan.buckets)),
        traffic=traffic,
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time any transport needs for a refit between two layouts, and which of its parts is the largest."""

    send: float
    """The bytes that leave the trainers at least once, over all of their network ports."""
    receive: float
    """The bytes that some domain needs and does not hold, over that domain's network ports."""
    in_domain: float
    """What the ranks of some domain still need once every byte crossed into it once, over their fast links."""

    @property
    def seconds(self) -> float:
        return max(self.send, self.receive, self.in_domain)

    @property
    def limit(self) -> str:
        return max(("network send", self.send), ("network receive", self.receive), ("in-domain", self.in_domain),
                   key=lambda part: part[1])[0]  # fmt: skip


def lower_bound(
    plan: Plan, cluster: Cluster, source: SideDescription, senders: Sequence[int], traffic: Traffic | None = None
) -> Bound:
    """The bound of the refit that ``plan`` serves: ``plan`` must reshard everything, once per domain. ``traffic`` is
    what ``measure(plan)`` returns, if it is at hand.

    With relay between domains one copy of every byte has to leave the trainers, so the send part counts each byte once,
    over the ports of the ranks that hold it. It is zero when a domain mixes trainers and inference ranks, because bytes
    may then never leave."""
    traffic = traffic or measure(plan)
    network_in, domain_in = (traffic.total(traffic.of_link(link)[1]) for link in (Link.NETWORK, Link.DOMAIN))
    receive = in_domain = 0.0
    for domain in plan.domains:
        ranks = list(domain)
        receive = max(receive, float(network_in[ranks].sum()) / (_ports(len(ranks), cluster) * cluster.nic_rate))
        in_domain = max(in_domain, float(domain_in[ranks].sum()) / (len(ranks) * cluster.domain_rate))
    trainers = set(senders)
    mixed = any(trainers & set(domain) and not trainers >= set(domain) for domain in plan.domains)
    ports = _port_of(plan, cluster, len(network_in))
    send = 0.0 if mixed else _send_seconds(_bytes_by_holders(plan, source), ports, cluster)
    return Bound(send, receive, in_domain)


def _bytes_by_holders(plan: Plan, source: SideDescription) -> dict[tuple[int, ...], int]:
    """Wire bytes by the exact set of ranks that hold them."""
    layouts = {entry.name: entry.layout for entry in source.entries}
    held: dict[tuple[int, ...], int] = {}
    for group in plan.groups:
        layout = source.layouts[layouts[plan.parameters[group.members[0]].name]]
        for cell in layout.cells:
            nbytes = cell.region.numel * ITEMSIZE[group.wire_dtype] * len(group.members)
            held[cell.ranks] = held.get(cell.ranks, 0) + nbytes
    return held


def _send_seconds(held: dict[tuple[int, ...], int], ports: np.ndarray, cluster: Cluster) -> float:
    """All bytes over all holders' ports, or the bytes of one set of holders over its own, whichever is longer."""
    everyone = sorted({rank for ranks in held for rank in ranks})
    sets = [(ranks, nbytes) for ranks, nbytes in held.items()] + [(tuple(everyone), sum(held.values()))]
    return max(
        (nbytes / (len(np.unique(ports[list(ranks)])) * cluster.nic_rate) for ranks, nbytes in sets), default=0.0
    )


def _ports(ranks: int, cluster: Cluster) -> int:
    """Network ports of ``ranks`` consecutive ranks."""
    return max(1, -(-ranks // cluster.ports_shared_by))


def _phase_times(plan: Plan, traffic: Traffic, cluster: Cluster, overlap: bool) -> dict[str, np.ndarray]:
    """Seconds of every phase of every distinct bucket, [D, ports] for the network and [D, R] for the others."""
    load = traffic.whole / cluster.copy_rate + traffic.whole_tensors * cluster.load_seconds_per_tensor
    return {
        "pack": traffic.packed / cluster.copy_rate + cluster.bucket_overhead,
        "network": _network_seconds(plan, traffic, cluster, overlap),
        "in_domain": _domain_seconds(traffic, cluster, overlap),
        "unpack": (traffic.unpacked - traffic.whole) / cluster.copy_rate,
        "load": load,
    }


def _network_seconds(plan: Plan, traffic: Traffic, cluster: Cluster, overlap: bool) -> np.ndarray:
    """Time of every port, [D, ports]. Hops of one bucket run at once when phases overlap, else one after the other."""
    ports = _port_of(plan, cluster, traffic.packed.shape[1])
    rate = cluster.nic_rate * cluster.network_efficiency
    total: np.ndarray | None = None
    for out, into in _rounds(traffic, Link.NETWORK, overlap):
        received = _by_port(into, ports) / rate
        seconds = np.maximum(_by_port(out, ports) / rate, received)
        slowest = seconds.max(1, initial=0, keepdims=True)
        load = np.divide(received.max(1, initial=0, keepdims=True), slowest, out=np.zeros_like(slowest),
                         where=slowest > 0)  # fmt: skip
        met = np.clip((load - cluster.flow_free) / (cluster.flow_knee - cluster.flow_free), 0, 1)
        seconds = seconds * (1 + cluster.flow_loss * met)
        if not overlap:
            seconds = np.broadcast_to(seconds.max(1, initial=0, keepdims=True), seconds.shape)
        total = seconds if total is None else total + seconds
    if total is None:
        return np.zeros((len(traffic.packed), 1))
    messages = _by_port(np.maximum(traffic.messages_out, traffic.messages_in).astype(np.float64), ports)
    return total + np.where(total > 0, cluster.network_latency + messages * cluster.message_overhead, 0)


def _domain_seconds(traffic: Traffic, cluster: Cluster, overlap: bool) -> np.ndarray:
    """Time of every rank's fast link, [D, R]."""
    rate = cluster.domain_rate * cluster.domain_efficiency
    seconds = np.zeros_like(traffic.packed)
    for out, into in _rounds(traffic, Link.DOMAIN, overlap):
        seconds += np.maximum(out, into) / rate
    return seconds + np.where(seconds > 0, cluster.domain_latency, 0)


def _rounds(traffic: Traffic, link: Link, overlap: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Bytes out and in, [D, R], of what runs at once over ``link``."""
    if overlap:
        return [traffic.of_link(link)]
    return [(traffic.send[key], traffic.recv[key]) for key in sorted(traffic.send) if key[0] is link]


def _port_of(plan: Plan, cluster: Cluster, ranks: int) -> np.ndarray:
    """Network port of every rank, [R]: consecutive ranks of a domain fill its nodes."""
    port = np.zeros(ranks, np.int64)
    first = 0
    for domain in plan.domains:
        place = np.arange(len(domain))
        node, local = place // cluster.node_ranks, place % cluster.node_ranks
        per_node = -(-cluster.node_ranks // cluster.ports_shared_by)
        port[list(domain)] = first + node * per_node + local // cluster.ports_shared_by
        first = int(port[list(domain)].max()) + 1
    return port


def _by_port(table: np.ndarray, ports: np.ndarray) -> np.ndarray:
    """Sum the columns of ``table`` [D, R] by port."""
    if len(np.unique(ports)) == len(ports):
        return table
    summed = np.zeros((len(table), int(ports.max(initial=0)) + 1))
    np.add.at(summed.T, ports, table.T)
    return summed


def _pipeline(phases: dict[str, np.ndarray], kind: np.ndarray, in_flight: int) -> np.ndarray:
    """Start and end, [buckets, phases, 2]. A port or rank serves a phase of one bucket at a time; a bucket begins a
    phase when it has left the one before, and enters the first when the bucket ``in_flight`` places before it has left
    the last."""
    buckets = len(kind)
    spans = np.zeros((buckets, len(PHASES), 2))
    free = [np.zeros(phases[phase].shape[1]) for phase in PHASES]
    for bucket in range(buckets):
        ready = spans[bucket - in_flight, -1, 1] if bucket >= in_flight else 0.0
        for number, phase in enumerate(PHASES):
            work = phases[phase][kind[bucket]]
            live = work > 0
            if not live.any():
                spans[bucket, number] = ready
                continue
            begin = np.maximum(free[number], ready)
            free[number] = np.where(live, begin + work, free[number])
            ready_next = float(free[number][live].max())
            spans[bucket, number] = float(begin[live].min()), max(ready, ready_next)
            ready = max(ready, ready_next)
    return spans


def _peak_staged(traffic: Traffic, overlap: bool) -> int:
    """Most bytes that one rank stages: of one bucket, or of all neighbours that are in flight together."""
    kinds, together = traffic.kind.tolist(), IN_FLIGHT if overlap else 1
    windows = {tuple(kinds[first : first + together]) for first in range(max(1, len(kinds) - together + 1))}
    return int(max(traffic.staged[list(window)].sum(0).max(initial=0) for window in windows))


def _total(traffic: Traffic, link: Link) -> int:
    return round(sum(nbytes for (_, of), nbytes in traffic.by_route.items() if of is link))


def _over_mean(values: np.ndarray, ranks: Sequence[int]) -> float:
    """Largest over mean of ``values`` at ``ranks``; 1.0 when nothing moves."""
    mine = values[[rank for rank in ranks if rank < len(values)]]
    return float(mine.max() / mine.mean()) if len(mine) and mine.mean() > 0 else 1.0


def _limit(busy: dict[str, float], traffic: Traffic, cluster: Cluster, buckets: int) -> str:
    """The phase that is busy longest, and on which rank."""
    phase = max(busy, key=lambda name: busy[name])
    if busy[phase] == 0:
        return "nothing moves"
    if phase == "pack":
        slow = cluster.bucket_overhead * buckets > busy[phase] / 2
        return "overhead of buckets" if slow else f"packing on rank {int(traffic.total(traffic.packed).argmax())}"
    if phase == "unpack":
        return f"unpacking on rank {int(traffic.total(traffic.unpacked).argmax())}"
    if phase == "load":
        return f"the model's own loader on rank {int(traffic.total(traffic.whole).argmax())}"
    out, into = (traffic.total(table) for table in traffic.of_link(Link.NETWORK if phase == "network" else Link.DOMAIN))
    name = "network" if phase == "network" else "in-domain link"
    if out.max() >= into.max():
        return f"{name}, sending: rank {int(out.argmax())}"
    return f"{name}, receiving: rank {int(into.argmax())}"
