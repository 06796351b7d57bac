"""A communicator of the refit's own: torch's NCCL process group, set up so that only the refit decides its fate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

NEVER = timedelta(days=1)
"""torch's own timeout of an operation. Its watchdog would end the process; the wire has deadlines of its own."""

SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Read by torch when it makes a group. By default its watchdog ends the whole process when a peer is lost, and with it
a trainer that could have gone on."""

GroupMaker = Callable[[dist.Store, int, int, torch.device], "dist.ProcessGroupNCCL"]


def make_group(store: dist.Store, rank: int, size: int, device: torch.device) -> dist.ProcessGroupNCCL:
    """A group whose communicator is not formed yet. ``eager_connect_single_device`` forms it, together with all ranks;
    being non-blocking, it can be aborted at any time."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = NEVER
    options.config.blocking = 0
    with _environment(SETTINGS):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def missing() -> str | None:
    """Why NCCL cannot be used by this process, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (torch.cuda.is_available() is False)"
    if not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return None


def loaded_version() -> tuple[int, ...]:
    """Of the NCCL library in this process (``torch.cuda.nccl.version()`` is that of torch's build); empty without."""
    return tuple(dist.ProcessGroupNCCL.get_runtime_nccl_version()) if dist.is_nccl_available() else ()
