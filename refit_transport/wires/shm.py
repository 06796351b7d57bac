"""Memory that ranks of one host read in place: memfds, reached through /proc, so that a crash leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from dataclasses import dataclass

import torch

HEADER = 4096
"""The first page of a block holds its token; the bytes behind it are the caller's."""
TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """How another process finds a block."""

    pid: int
    fd: int
    nbytes: int
    token: bytes


class Block:
    """``nbytes`` of shared memory, every page touched. The descriptor is closed when ``tensor`` is dropped."""

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("refit", os.MFD_CLOEXEC)
        token = secrets.token_bytes(TOKEN_BYTES)
        os.ftruncate(fd, HEADER + nbytes)
        memory = mmap.mmap(fd, HEADER + nbytes)
        memory[:TOKEN_BYTES] = token
        self.address = BlockAddress(os.getpid(), fd, nbytes, token)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER, count=nbytes).zero_()
        weakref.finalize(self.tensor, os.close, fd)


def open_block(address: BlockAddress) -> torch.Tensor:
    """Map another process's block: uint8 tensor of ``address.nbytes``. Raises OSError when it cannot be reached:
    another host, another user, another pid namespace, or a process that is gone."""
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        size = HEADER + address.nbytes
        if os.fstat(fd).st_size < size:
            raise OSError("the block has another size")
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    if memory[:TOKEN_BYTES] != address.token:
        raise OSError("the block belongs to another process")
    return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER, count=address.nbytes)
