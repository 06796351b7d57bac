"""Chooses the wire that a session's options name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .base import Wire

WIRES = ("auto", "tcp", "gloo", "nccl", "nccl_m2n")
"""Allowed values of ``wire``. ``auto`` is ``nccl`` where there are GPUs, ``tcp`` elsewhere."""


def make_wire(name: str, options: Mapping[str, Any]) -> Wire:
    """A wire, not yet connected. Raises ValueError for an unknown name."""
    if name == "auto":
        name = "nccl" if torch.cuda.is_available() else "tcp"
    if name == "tcp":
        from .tcp import TcpWire

        return TcpWire(
            host=options.get("host", "127.0.0.1"),
            network_interface=options.get("network_interface"),
            domain_interface=options.get("domain_interface"),
        )
    if name == "gloo":
        from .gloo import GlooWire

        return GlooWire(network_interface=options.get("network_interface"))
    if name in ("nccl", "nccl_m2n"):
        from .nccl import NcclWire

        return NcclWire(m2n=name == "nccl_m2n")
    raise ValueError(f"unknown wire {name!r}; allowed: {', '.join(WIRES)}")
