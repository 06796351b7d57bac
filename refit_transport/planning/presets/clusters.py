"""What a cluster's links and memories do per second, as presets and as a YAML file of the same fields."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

GB = 1e9


@dataclass(frozen=True, slots=True)
class Cluster:
    """Rates of one cluster. Every rate is bytes per second and direction; every time is seconds."""

    name: str
    node_ranks: int
    """Ranks (GPUs) of one node."""
    domain_ranks: int
    """Ranks of one fast-link domain that a job uses. A side of the refit starts on a domain of its own."""
    nic_rate: float
    """Of one network port, each direction at once."""
    node_ports: int
    """Network ports of a node; fewer than ``node_ranks`` means that ranks share a port."""
    domain_rate: float
    """Of one rank to the other ranks of its domain."""
    copy_rate: float
    """Bytes copied per second when a rank packs or unpacks (each byte is read once and written once)."""
    source: str
    """Where the figures are from."""
    network_efficiency: float = 0.985
    """Share of ``nic_rate`` that payload can reach (headers, acknowledgements)."""
    domain_efficiency: float = 0.65
    """Share of ``domain_rate`` that the exchange inside a domain reaches."""
    flow_loss: float = 0.096
    """Share of time that uncoordinated flows add when they meet in a receiving port that is loaded to ``flow_knee``."""
    flow_free: float = 0.25
    """A receiving port that is loaded less than this adds nothing; in between the loss grows linearly."""
    flow_knee: float = 0.5
    network_latency: float = 8e-6
    """From a rank's memory to another's over the network, once per bucket."""
    domain_latency: float = 3e-6
    """The same inside a domain."""
    message_overhead: float = 1.5e-6
    """Time that one more message costs the rank that sends or receives it."""
    bucket_overhead: float = 60e-6
    """Per bucket: launches, events, and the meeting of its senders and receivers."""
    load_seconds_per_tensor: float = 60e-6
    """Host time of a model's own loader per whole tensor."""
    assumed: tuple[str, ...] = ()
    """Fields whose figures are assumptions rather than public or measured."""

    @property
    def ports_shared_by(self) -> int:
        """Ranks per network port."""
        return max(1, -(-self.node_ranks // self.node_ports))


_ASSUMED = ("copy_rate", "network_efficiency", "domain_efficiency", "flow_loss", "flow_free",
            "flow_knee", "network_latency",
    "message_overhead",
            "domain_latency", "bucket_overhead", "load_seconds_per_tensor")  # fmt: skip

CLUSTERS: dict[str, Cluster] = {
    "dgx-h100": Cluster(
        name="dgx-h100", node_ranks=8, domain_ranks=8, nic_rate=50 * GB, node_ports=8, domain_rate=450 * GB,
        copy_rate=1200 * GB, assumed=_ASSUMED,
        source="NVIDIA DGX H100: 8 GPUs on NVLink at 900 GB/s both directions together, 8 ConnectX-7 of 400 Gbit/s",
    ),
    "dgx-gb200": Cluster(
        name="dgx-gb200", node_ranks=4, domain_ranks=64, nic_rate=50 * GB, node_ports=4, domain_rate=900 * GB,
        copy_rate=2500 * GB, assumed=(*_ASSUMED, "domain_ranks"),
        source="NVIDIA GB200 NVL72: 72 GPUs in 18 trays of 4 on NVLink at 1.8 TB/s both directions together, one "
        "400 Gbit/s port per GPU; jobs of 2^n ranks use 64 GPUs of each 72",
    ),
    "cpu-host": Cluster(
        name="cpu-host", node_ranks=8, domain_ranks=8, nic_rate=1.25 * GB, node_ports=1, domain_rate=9 * GB,
        copy_rate=9 * GB, network_latency=55e-6, domain_latency=20e-6, message_overhead=20e-6,
        bucket_overhead=200e-6, flow_loss=0.03,
        assumed=("nic_rate", "node_ranks", "flow_loss", "network_efficiency", "bucket_overhead",
                 "load_seconds_per_tensor"),
        source="one host per domain with a shared 10 Gbit/s port; shared memory copies as measured on a two-core "
        "server (memcpy 19.5 GB/s on one core)",
    ),
}  # fmt: skip


class ClusterError(ValueError):
    """Every violation found in a cluster description, one per line."""


def load_cluster(name_or_path: str) -> Cluster:
    """A preset by its name, or the cluster that a YAML file describes: ``base`` (a preset, optional) and any fields of
    ``Cluster``; ``nic_gbit_per_s`` and ``domain_gbyte_per_s`` may be given in place of the rates in bytes.

    Raises:
        ClusterError: an unknown name, an unreadable file, and every unknown or missing or impossible field.
    """
    if name_or_path in CLUSTERS:
        return CLUSTERS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise ClusterError(f"--cluster: no preset and no file {name_or_path!r}; presets: {', '.join(CLUSTERS)}")
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise ClusterError(f"--cluster: cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ClusterError(f"--cluster: {path} must be a mapping of fields, got {type(values).__name__}")
    return _from_values(values, path)


def _from_values(values: dict, path: Path) -> Cluster:
    base = values.pop("base", None)
    found = [] if base is None or base in CLUSTERS else [f"--cluster: {path}: base {base!r} is none of "
                                                         f"{', '.join(CLUSTERS)}"]  # fmt: skip
    if "nic_gbit_per_s" in values:
        values["nic_rate"] = _number(values.pop("nic_gbit_per_s")) * GB / 8
    if "domain_gbyte_per_s" in values:
        values["domain_rate"] = _number(values.pop("domain_gbyte_per_s")) * GB
    known = {field.name: field for field in fields(Cluster)}
    merged = {field: getattr(CLUSTERS[base], field) for field in known} if base in CLUSTERS else {}
    merged |= {"name": path.stem, "source": str(path)} | values
    if base in CLUSTERS and "assumed" not in values:
        merged["assumed"] = tuple(field for field in merged["assumed"] if field not in values)
    merged["assumed"] = tuple(merged.get("assumed", ()))
    found += [f"--cluster: {path}: unknown field {key!r}; allowed: {', '.join(known)}" for key in merged
              if key not in known]  # fmt: skip
    required = ("node_ranks", "domain_ranks", "nic_rate", "node_ports", "domain_rate", "copy_rate")
    found += [f"--cluster: {path}: {key} is missing (or set base)" for key in required if key not in merged]
    found += _impossible(merged, path, known)
    if found:
        raise ClusterError("\n".join(found))
    return Cluster(**merged)


def _impossible(merged: dict, path: Path, known: dict) -> list[str]:
    """Fields that are no numbers, no positive numbers, or shares outside (0, 1]."""
    found = []
    for key, value in merged.items():
        if key not in known or key in ("name", "source", "assumed"):
            continue
        low_ok = key in (
            "flow_loss",
            "network_latency",
            "domain_latency",
            "message_overhead",
            "bucket_overhead",
            "load_seconds_per_tensor",
        )
        if _number(value) < 0 or (_number(value) == 0 and not low_ok) or _number(value) != _number(value):
            found.append(f"--cluster: {path}: {key} must be a positive number, got {value!r}")
        elif key.endswith(("efficiency", "knee")) and value > 1:
            found.append(f"--cluster: {path}: {key} is a share and cannot be above 1, got {value!r}")
        elif key in ("node_ranks", "domain_ranks", "node_ports") and not isinstance(value, int):
            found.append(f"--cluster: {path}: {key} must be a whole number, got {value!r}")
    return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
