"""NCCL M2N itself: `nccl.m2n` and the communicator that it runs on, imported when asked for, with its conditions."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from refit_transport.planning.m2n import Geometry, SideMesh

from . import nccl_group
from .base import WireError

log = logging.getLogger("refit_transport")

OLDEST_NCCL = (2, 30, 5)
INSTALL = "pip install 'refit-transport[m2n]'"
_SIZES = "NCCL_RESHARD_PACK_BUFFSIZES"
_LEAST = 2 << 10
"""Bytes. The library stages no less."""


def missing(
    nccl: Callable[[], str | None] = nccl_group.missing,
    version: Callable[[], tuple[int, ...]] = nccl_group.loaded_version,
    installed: Callable[[], bool] = lambda: bool(
        find_spec("nccl") and find_spec("nccl.m2n") and find_spec("nccl.core")
    ),
) -> str | None:
    """Why M2N cannot be used by this process, or None."""
    if (reason := nccl()) is not None:
        return reason
    if not installed():
        return f"`nccl.m2n` is not installed ({INSTALL})"
    if version() < OLDEST_NCCL:
        found, oldest = (".".join(map(str, v)) for v in (version(), OLDEST_NCCL))
        return f"torch runs NCCL {found}; M2N needs {oldest} or newer (install a newer nvidia-nccl-cu12 or -cu13)"
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE is 0; M2N needs cuMem memory (unset it, on all ranks)"
    return None


def staging_of(sizes: str) -> dict[int, int]:
    """Bytes of a slot to number of slots, as ``NCCL_RESHARD_PACK_BUFFSIZES`` asks for them, such as ``8k:2,1m``; four
    slots where it does not say."""
    return {
        int(size.rstrip("km")) * {"k": 1 << 10, "m": 1 << 20}.get(size[-1], 1): int(slots or 4)
        for size, slots in re.findall(r"(\d+[km]?)(?::(\d+))?", sizes.lower())
    }


def loaded_nccl(maps: str) -> list[str]:
    """The libnccl files in the text of ``/proc/self/maps``."""
    return sorted(set(re.findall(r"\S*/libnccl\.so[\w.]*", maps)))


class Library:
    """One process's use of M2N. ``m2n`` and ``core`` are the modules ``nccl.m2n`` and ``nccl.core``."""

    def __init__(self, m2n: Any = None, core: Any = None) -> None:
        self._m2n = m2n or _import("nccl.m2n")
        self._core = core or _import("nccl.core")
        self._comm: Any = None
        self._handle: Any = None
        self._rank = -1
        self._call_bytes = 0
        self.staged_bytes = 0
        """What the library stages in once it is open."""
        files = loaded_nccl(Path("/proc/self/maps").read_text())
        if len(files) > 1:
            raise WireError(
                f"two NCCL libraries are loaded, {' and '.join(files)}: M2N and torch have to use the same one "
                "(LD_PRELOAD the newer, set VLLM_NCCL_SO_PATH to it)",
                phase="connect",
            )

    def new_id(self) -> bytes:
        """What identifies a new communicator; made by one rank, given to all."""
        return bytes(self._core.get_unique_id())

    def connect(self, unique_id: bytes, rank: int, size: int) -> None:
        """Form the communicator, together with all its ranks. Blocks until they are there."""
        identity = self._core.UniqueId()
        identity.__setstate__(unique_id)
        self._comm = self._core.Communicator.init(size, rank, identity)
        self._rank = rank

    def open(self, call_bytes: int) -> None:
        """Make the library ready for calls of at most ``call_bytes`` per rank. It reads its environment only here, so a
        later plan with larger calls is refused with WireError, and so is what the user set if it is too small."""
        if self._handle is None:
            self._start(call_bytes)
        if call_bytes > self._call_bytes:
            raise WireError(
                f"M2N was made ready for calls of {self._call_bytes} bytes, this plan has larger ones ({call_bytes}); "
                "join a new session",
                phase="bind",
            )

    def _start(self, call_bytes: int) -> None:
        """What is set for this session alone must not stay for the next one in this process."""
        users = os.environ.get(_SIZES)
        sizes = users or f"{-(-max(call_bytes, _LEAST) // 1024)}k:1"
        slots = staging_of(sizes)
        if max(slots, default=0) < call_bytes:
            raise WireError(
                f"{_SIZES} is {sizes}, too small for calls of {call_bytes} bytes; unset it, on all ranks", phase="bind"
            )
        os.environ[_SIZES] = sizes
        try:
            self._handle, self._call_bytes = self._m2n.init(), call_bytes
        finally:
            if users is None:
                del os.environ[_SIZES]
        self.staged_bytes = sum(size * count for size, count in slots.items())

    def reshard(
        self,
        geometry: Geometry,
        members: int,
        source: torch.Tensor | None,
        sink: torch.Tensor | None,
        stream: object,
    ) -> None:
        """Queue one call on ``stream``. Every rank of the communicator makes it, with equal metadata; ``source`` and
        ``sink`` are this rank's buffers, contiguous and of the geometry's local shapes, None where it has no part."""
        sides = zip((geometry.source, geometry.sink), (source, sink), strict=True)
        described = [self._described(geometry, side, members, buffer) for side, buffer in sides]
        self._handle.reshard(self._comm, *described, stream=stream)

    def _described(self, geometry: Geometry, side: SideMesh, members: int, buffer: torch.Tensor | None) -> Any:
        placements = [self._m2n.Replicate() for _ in side.dims]
        if side.axis is not None:
            placements[side.axis] = self._m2n.Shard(side.dim)
        return self._m2n.DistTensor(
            buffer,
            geometry.local_shape(side, members),
            geometry.dtype,
            mesh=self._m2n.Mesh(side.dims, side.start),
            placements=placements,
        )

    def abort(self) -> None:
        """Try to end what is under way. A call that waits for a lost peer may not end before the process does."""
        if self._comm is not None:
            self._comm.abort()

    def close(self) -> None:
        """Release the library's memory and the communicator, in this order; nothing may be under way."""
        if self._handle is not None:
            self._handle.destroy()
        if self._comm is not None:
            self._comm.abort()
        self._handle = self._comm = None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise WireError(f"cannot import {name} ({error}); {INSTALL}", phase="connect") from error
