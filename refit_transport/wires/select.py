"""Chooses the wire that a session's options name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .base import Wire, WireError

Options = Mapping[str, Any]


def _tcp(options: Options) -> Wire:
    from .tcp import TcpWire

    return TcpWire(
        host=options.get("host", "127.0.0.1"),
        network_interface=options.get("network_interface"),
        domain_interface=options.get("domain_interface"),
        stall_s=_stall_seconds(options),
    )


def _stall_seconds(options: Options) -> float:
    """How long a peer may give no sign of life: long enough for an engine that loads a bucket meanwhile."""
    return min(30.0, float(options.get("timeout_s", 20.0)) / 4)


def _gloo(options: Options) -> Wire:
    from .gloo import GlooWire

    return GlooWire(network_interface=options.get("network_interface"))


def _nccl(options: Options) -> Wire:
    from .nccl import NcclWire
    from .nccl_group import missing

    _require("nccl", missing())
    return NcclWire(network_interface=options.get("network_interface"))


def _nccl_m2n(options: Options) -> Wire:
    from .m2n import M2nWire
    from .m2n_library import missing

    _require("nccl_m2n", missing())
    return M2nWire(network_interface=options.get("network_interface"))


_MAKERS: dict[str, Callable[[Options], Wire]] = {
    "tcp": _tcp,
    "gloo": _gloo,
    "nccl": _nccl,
    "nccl_m2n": _nccl_m2n,
}

WIRES = ("auto", *_MAKERS)
"""Allowed values of ``wire``. ``auto`` is ``nccl`` where there are GPUs, ``tcp`` elsewhere."""


def make_wire(name: str, options: Options) -> Wire:
    """A wire, not yet connected. Raises ValueError for an unknown name, and WireError for one that this process cannot
    run, with what is missing."""
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() else "tcp"
    if name not in _MAKERS:
        raise ValueError(f"unknown wire {name!r}; allowed: {', '.join(WIRES)}")
    return _MAKERS[name](options)


def _require(name: str, missing: str | None) -> None:
    if missing is not None:
        raise WireError(f"wire {name!r} cannot run here: {missing}; set `wire` to `tcp` or `gloo`, or to `auto`")
