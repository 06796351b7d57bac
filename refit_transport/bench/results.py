"""From what was measured to the figures of a benchmark, as plain data for the JSON file, the table and the plot."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from statistics import mean, median
from typing import Any

import torch

from .bound import network_minimum, received_bytes
from .config import BenchConfig
from .refit import Measured, Measurement, Round, card_of

GLOSSARY = {
    "seconds_median": "median over rounds, from the common start to the slowest inference rank",
    "bytes_network": "payload that crossed between domains, median over rounds: sent by all cards when emulated, "
    "counted by the wire otherwise",
    "bytes_network_minimum": "what each domain needs and does not hold, summed",
    "bound_seconds": "emulated: the busiest domain's share of that minimum at the rate of its cards; otherwise the "
    "plain stream between two processes that moves as many bytes as all engines receive, if it is run",
    "share_of_bound": "bound_seconds / seconds_median",
    "busiest_nic_over_mean": "busiest card of the trainers by bytes sent, or of the engines by bytes received, over "
    "the mean of its side; the larger of the two",
    "busiest_nic_over_fair_share": "the same over the minimum divided by the cards of the side",
    "peak_extra_bytes": "most that one rank grew while it connected and in its first refit: anonymous memory at its "
    "peak, and the shared memory that the rank itself made",
    "staged_bytes": "what the runtime says it allocated on the largest rank",
    "predicted_seconds": "what the cost model says of the plan, before the run",
    "gb_per_second": "bytes that all inference ranks receive / seconds_median / 1e9",
    "late_seconds_max": "how long after the common start the last rank woke up",
}
"""What the keys mean; saved with the figures."""


def summarise(measurement: Measurement) -> dict[str, Any]:
    """Everything about a run, as plain data."""
    config = measurement.config
    transports = {name: _figures(measurement, name) for name in measurement.transports}
    summary = {
        "name": config.name,
        "title": config.title,
        "emulated": measurement.emulated,
        "rounds": config.rounds,
        "tensors": len(measurement.tensors),
        "bytes_model": sum(tensor.wire_nbytes for tensor in measurement.tensors),
        "bytes_received": received_bytes(measurement.tensors),
        "config": asdict(config),
        "machine": _machine(),
        "priority": sorted({t.priority for m in measurement.transports.values() for t in _timings(m)}),
        "growth": measurement.growth,
        "transports": transports,
        "ratios": _ratios(transports),
        "glossary": GLOSSARY,
    }
    return {**summary, "targets": _targets(config, summary)}


def _figures(measurement: Measurement, name: str) -> dict[str, Any]:
    config, measured = measurement.config, measurement.transports[name]
    minimum = network_minimum(measurement.tensors, config.cluster.domains)
    seconds = [entry.seconds for entry in measured.rounds]
    network = [_network_bytes(entry, measurement.emulated) for entry in measured.rounds]
    moved = None if None in network else int(median(network))
    bound = minimum.seconds(config.cluster) if measurement.emulated else _stream_seconds(measurement)
    return {
        "seconds_median": median(seconds),
        "seconds_all": seconds,
        "bytes_network": moved,
        "bytes_network_minimum": minimum.total,
        "bytes_over_minimum": moved / minimum.total if moved is not None and minimum.total else None,
        "bound_seconds": bound,
        "share_of_bound": bound / median(seconds) if bound else None,
        **_balance(measurement, measured, minimum.total),
        "bytes_by_link": _by_link(measured),
        "messages": sum(t.counted.get("messages", 0) for t in measured.rounds[-1].ranks.values()) or None,
        "peak_extra_bytes": max(measured.extra_memory.values()),
        "staged_bytes": max(t.counted.get("staged_bytes", 0) for t in measured.rounds[-1].ranks.values()) or None,
        "predicted_seconds": measurement.predicted.get(name),
        "gb_per_second": received_bytes(measurement.tensors) / median(seconds) / 1e9,
        "phases": _phases(measured),
        "late_seconds_max": max(t.late for t in _timings(measured)),
        "packets_dropped": measured.drops if measurement.emulated else None,
    }


def _network_bytes(entry: Round, emulated: bool) -> int | None:
    """Bytes between domains in one refit; None where nothing counts them."""
    if emulated:
        return sum(card.sent_payload for card in entry.cards)
    counted = [timing.counted["sent"]["network"] for timing in entry.ranks.values() if "sent" in timing.counted]
    return sum(counted) if counted else None


def _stream_seconds(measurement: Measurement) -> float | None:
    stream = measurement.transports.get("stream")
    return median(entry.seconds for entry in stream.rounds) if stream else None


def _balance(measurement: Measurement, measured: Measured, minimum: int) -> dict[str, float | None]:
    """How much more than the others, and than its fair share, the busiest card of either side carried."""
    if not measurement.emulated:
        return {"busiest_nic_over_mean": None, "busiest_nic_over_fair_share": None}
    config, cards = measurement.config, card_of(measurement.config)
    senders = sorted({cards[rank] for rank in config.trainers.ranks})
    receivers = sorted({cards[rank] for rank in config.engines.ranks})
    over_mean, over_fair = [], []
    for entry in measured.rounds:
        sent = [entry.cards[card].sent_payload for card in senders]
        received = [entry.cards[card].received_payload for card in receivers]
        over_mean.append(max(max(side) / mean(side) if mean(side) else 1.0 for side in (sent, received)))
        over_fair.append(max(received) * len(received) / minimum if minimum else 1.0)
        if minimum and len(config.cluster.domains) == 2:
            over_fair[-1] = max(over_fair[-1], max(sent) * len(sent) / minimum)
    return {"busiest_nic_over_mean": median(over_mean), "busiest_nic_over_fair_share": median(over_fair)}


def _by_link(measured: Measured) -> dict[str, int] | None:
    """Bytes received by all ranks per link class, as the wire counted them."""
    counted = [t.counted["received"] for t in measured.rounds[-1].ranks.values() if "received" in t.counted]
    return {link: sum(one.get(link, 0) for one in counted) for link in counted[0]} if counted else None


def _phases(measured: Measured) -> dict[str, float] | None:
    """Seconds by phase of the rank that spent most in it, in the median round."""
    middle = sorted(measured.rounds, key=lambda entry: entry.seconds)[len(measured.rounds) // 2]
    phases: dict[str, float] = {}
    for timing in middle.ranks.values():
        for phase, seconds in timing.counted.get("seconds", {}).items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
    return phases or None


def _timings(measured: Measured) -> list[Any]:
    return [timing for entry in measured.rounds for timing in entry.ranks.values()]


def _ratios(transports: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times longer every other transport took than the first."""
    first, *others = transports
    base = transports[first]["seconds_median"]
    return {f"{other}/{first}": transports[other]["seconds_median"] / base for other in others}


def _targets(config: BenchConfig, summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target of the configuration beside what was measured for the first transport. ``min_`` and ``max_`` say
    which way a figure must go; ``min_ratio_X`` is against transport X."""
    first = next(iter(summary["transports"]))
    found = {}
    for key, required in config.targets.items():
        if required is None:  # a file takes back a target of its `defaults`
            continue
        direction, _, figure = key.partition("_")
        if figure.startswith("ratio_"):
            measured = summary["ratios"].get(f"{figure.removeprefix('ratio_')}/{first}")
        elif figure == "over_predicted":
            predicted = summary["transports"][first]["predicted_seconds"]
            measured = summary["transports"][first]["seconds_median"] / predicted if predicted else None
        elif figure.startswith("growth_"):
            measured = summary["growth"][figure.removeprefix("growth_")]
        elif figure == "extra_over_buckets":
            measured = summary["transports"][first]["peak_extra_bytes"] / (2 * config.bucket_bytes)
        else:
            measured = summary["transports"][first].get(figure)
        met = measured is not None and (measured >= required if direction == "min" else measured <= required)
        found[key] = {"required": required, "measured": measured, "met": met}
    return found


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
