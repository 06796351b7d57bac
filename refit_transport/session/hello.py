"""The handshake: what each member says of itself, and the differences that make a session impossible."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec

from refit_transport.planning.plan import PLANNER_VERSION

from .errors import HandshakeError


class Hello(msgspec.Struct, frozen=True):
    """One member's introduction."""

    rank: int
    role: str
    """``trainer`` or ``engine``."""
    host: str
    pid: int
    incarnation: str
    """New for every process and every join: connections of an earlier one are never reused."""
    wire: str
    device: str
    """``cpu`` or ``cuda``."""
    domain: str
    """Members with equal text are joined by a fast link."""
    must_match: dict[str, str]
    """Facts in which all members have to agree."""
    labels: dict[str, str] = {}
    """For messages and reports: the engine's replica, its TP and PP ranks, a trainer's mesh coordinate."""


def introduce(rank: int, role: str, *, wire: str, device: str, domain: str | None, labels: dict[str, str]) -> Hello:
    """This process's own hello."""
    return Hello(
        rank=rank,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        incarnation=uuid.uuid4().hex,
        wire=wire,
        device=device,
        domain=domain or socket.gethostname(),
        must_match=_facts(wire),
        labels=labels,
    )


def label(role: str, rank: int) -> str:
    """How a member is called in messages before the hellos are exchanged."""
    return f"{role} rank {rank} (pid {os.getpid()} on {socket.gethostname()})"


def _facts(wire: str) -> dict[str, str]:
    facts = {"refit_transport": _version("refit-transport"), "planner": str(PLANNER_VERSION), "wire": wire}
    if wire.startswith("nccl"):
        from refit_transport.wires.nccl_group import loaded_version

        facts["NCCL version"] = ".".join(map(str, loaded_version()))
        facts["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "unset")
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check_hellos(hellos: Sequence[Hello]) -> None:
    """Raises HandshakeError naming both values when members disagree, or when one side is empty."""
    for role in ("trainer", "engine"):
        if not any(h.role == role for h in hellos):
            raise HandshakeError(f"the session has no {role} rank among its {len(hellos)} members")
    first = hellos[0]
    for other in hellos[1:]:
        for key in sorted(first.must_match.keys() | other.must_match.keys()):
            a, b = first.must_match.get(key, "unset"), other.must_match.get(key, "unset")
            if a != b:
                raise HandshakeError(
                    f"{key} differs: {a} on {first.role} rank {first.rank} ({first.host}), "
                    f"{b} on {other.role} rank {other.rank} ({other.host}); make them equal"
                )


def domains_of(hellos: Sequence[Hello]) -> tuple[tuple[int, ...], ...]:
    """Ranks grouped by the fast-link domain they reported, in order of their lowest rank."""
    groups: dict[str, list[int]] = {}
    for hello in hellos:
        groups.setdefault(hello.domain, []).append(hello.rank)
    return tuple(sorted(tuple(sorted(ranks)) for ranks in groups.values()))
