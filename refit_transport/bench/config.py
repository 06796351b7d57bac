"""The configuration of a refit benchmark: cluster, layouts, tensors, what to compare and what to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .model import violations as model_violations
from .netlab import parse_rate

TRANSPORTS = (
    "nccl_reshard",
    "gather_broadcast",
    "gather_broadcast_every",
    "parameter_loop",
    "checkpoint",
    "stream",
)
"""``gather_broadcast`` has a single root here, ``gather_broadcast_every`` makes every trainer rank a root.
``parameter_loop`` and ``checkpoint`` are what users would pick instead; ``stream`` is a plain copy between two."""
NICS = ("rank", "node")
SCOPES = ("ffn", "all")
WIRES = ("tcp", "gloo")


class BenchConfigError(ValueError):
    """Every violation of a benchmark configuration, one a line."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where ranks are: domains of joint ranks, whose network cards (one a rank, or one a domain) have a rate."""

    domains: tuple[tuple[int, ...], ...]
    nic: str = "rank"
    rate: str = "1gbit"

    @property
    def bits_per_second(self) -> float:
        return parse_rate(self.rate)


@dataclass(frozen=True, slots=True)
class Side:
    """A mesh of ranks: its axes by name and size, the last one varying fastest over ``ranks``."""

    mesh: Mapping[str, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensors:
    """A family of tensors: ``name`` with ``{index}`` placeholders, repeated over every index of ``repeat``.

    ``trainers`` and ``engines`` place it: mesh axis to the dimension that the axis shards, or to the repeat index that
    the axis partitions (experts over ``ep``, layers over ``pp``). An axis that is not named replicates.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    repeat: Mapping[str, int] = field(default_factory=dict)
    trainers: Mapping[str, int | str] = field(default_factory=dict)
    engines: Mapping[str, int | str] = field(default_factory=dict)
    engine_dtype: str = ""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """All of it, checked."""

    name: str
    title: str
    cluster: Cluster
    trainers: Side
    engines: Side
    tensors: tuple[Tensors, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    """In the place of ``tensors``: ``preset``, and the keys of its configuration to change. Axes of a mesh place its
    tensors by their names, see ``model.AXES``."""
    transports: tuple[str, ...] = ("nccl_reshard", "gather_broadcast")
    scope: str = "all"
    rounds: int = 5
    bucket_bytes: int = 32 << 20
    relay: str = "auto"
    """Domain-to-domain relay, as the transports' option of that name."""
    wire: str = "tcp"
    """What moves the bytes of our own transports. gloo uses one network card for everything."""
    deadline_seconds: float = 120.0
    targets: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def world(self) -> tuple[int, ...]:
        return tuple(sorted({*self.trainers.ranks, *self.engines.ranks}))


def load(path: Path, overrides: Sequence[str] = ()) -> BenchConfig:
    """Read a YAML file over the one that it names under ``defaults``, apply ``key=value`` overrides and check it.
    Raises BenchConfigError with every violation."""
    try:
        merged = OmegaConf.merge(_read(path), OmegaConf.from_dotlist(list(overrides)))
        raw = OmegaConf.to_container(merged, resolve=True)
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise BenchConfigError(f"{path}: cannot be read: {error}") from error
    violations: list[str] = []
    config = _build(path, raw if isinstance(raw, dict) else {}, violations)
    if config is not None:
        violations += check(config)
    if violations or config is None:
        raise BenchConfigError("\n".join(f"{path}: {line}" for line in violations))
    return config


def _read(path: Path) -> DictConfig:
    content = OmegaConf.load(path)
    base = content.pop("defaults", None)
    return OmegaConf.merge(_read(path.parent / base), content) if base else content


def check(config: BenchConfig) -> list[str]:
    """Violations of a configuration whose types are right."""
    found = [
        f"{key}: got {got!r}, allowed: {', '.join(allowed)}"
        for key, got, allowed in (
            ("cluster.nic", config.cluster.nic, NICS),
            ("scope", config.scope, SCOPES),
            ("wire", config.wire, WIRES),
        )
        if got not in allowed
    ]
    found += [
        f"transports: got {name!r}, allowed: {', '.join(TRANSPORTS)}"
        for name in config.transports
        if name not in TRANSPORTS
    ]
    found += [f"{key}: got {getattr(config, key)}, allowed: 1 or more" for key in ("rounds",) if config.rounds < 1]
    try:
        parse_rate(config.cluster.rate)
    except ValueError as error:
        found.append(f"cluster.{error}")
    placed = sorted(rank for domain in config.cluster.domains for rank in domain)
    if placed != list(config.world):
        found.append(f"cluster.domains: got ranks {placed}, allowed: each of {list(config.world)} exactly once")
    if config.model:
        found += model_violations(config.model, {"trainers": config.trainers, "engines": config.engines})
    for tensors in config.tensors:
        found += _check_placements(tensors, "trainers", config.trainers) + _check_placements(
            tensors, "engines", config.engines
        )
    return found


def _check_placements(tensors: Tensors, key: str, side: Side) -> list[str]:
    found = []
    for axis, target in getattr(tensors, key).items():
        where = f"tensors[{tensors.name}].{key}.{axis}"
        if axis not in side.mesh:
            found.append(f"{where}: got axis {axis!r}, allowed: {', '.join(side.mesh)}")
        elif isinstance(target, str):
            if target not in tensors.repeat:
                found.append(f"{where}: got {target!r}, allowed: a dimension, or one of {list(tensors.repeat)}")
            elif tensors.repeat[target] % side.mesh[axis]:
                found.append(
                    f"{where}: got {tensors.repeat[target]} x {target}, allowed: a multiple of {side.mesh[axis]}"
                )
        elif not 0 <= target < len(tensors.shape):
            found.append(f"{where}: got dimension {target}, allowed: 0 to {len(tensors.shape) - 1}")
    return found


def _build(path: Path, raw: dict[str, Any], violations: list[str]) -> BenchConfig | None:
    _known(raw, BenchConfig, "", violations)
    missing = [key for key in ("cluster", "trainers", "engines") if not raw.get(key)]
    violations += [f"{key}: missing" for key in missing]
    if bool(raw.get("tensors")) == bool(raw.get("model")):
        violations.append("tensors, model: exactly one of the two says what is moved")
    if violations:
        return None
    trainers = _side(raw["trainers"], 0, "trainers", violations)
    engines = _side(raw["engines"], len(trainers.ranks), "engines", violations)
    _known(raw["cluster"], Cluster, "cluster.", violations)
    entries = raw.get("tensors") or []
    for number, entry in enumerate(entries):
        _known(entry, Tensors, f"tensors[{number}].", violations)
        violations += [f"tensors[{number}].{key}: missing" for key in ("name", "shape") if key not in entry]
    if violations:
        return None
    domains = raw["cluster"].get("domains") or [trainers.ranks, engines.ranks]
    plain = ("model", "scope", "rounds", "bucket_bytes", "relay", "wire", "deadline_seconds", "targets")
    rest = {key: raw[key] for key in plain if key in raw}
    if "transports" in raw:
        rest["transports"] = tuple(raw["transports"])
    return BenchConfig(
        name=raw.get("name", path.stem),
        title=raw.get("title", path.stem),
        cluster=Cluster(
            domains=tuple(map(tuple, domains)),
            nic=raw["cluster"].get("nic", "rank"),
            rate=str(raw["cluster"].get("rate", "1gbit")),
        ),
        trainers=trainers,
        engines=engines,
        tensors=tuple(Tensors(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries),
        **rest,
    )


def _side(raw: dict[str, Any], first: int, key: str, violations: list[str]) -> Side:
    _known(raw, Side, f"{key}.", violations)
    mesh = dict(raw.get("mesh") or {})
    size = 1
    for length in mesh.values():
        size *= length
    ranks = tuple(raw.get("ranks") or range(first, first + size))
    if len(ranks) != size:
        violations.append(f"{key}.ranks: got {len(ranks)} ranks, allowed: {size}, the size of the mesh {mesh}")
    return Side(mesh, ranks)


def _known(raw: Mapping[str, Any], kind: type, prefix: str, violations: list[str]) -> None:
    allowed = [entry.name for entry in fields(kind)]
    for key in raw:
        if key not in allowed:
            near = get_close_matches(key, allowed, 1)
            violations.append(f"{prefix}{key}: unknown key" + (f", nearest known: {near[0]}" if near else ""))
