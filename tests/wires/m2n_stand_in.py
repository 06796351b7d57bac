"""A STAND-IN for `nccl.m2n` and `nccl.core`: records every call, enforces the library's documented preconditions, and
moves real bytes over gloo.

It is not the library: it proves that the adapter describes its tensors rightly and keeps the rules below, and nothing
about speed, transports or the library itself. Enforced are: rank 1 to 3; contiguous buffers of the described shape and
dtype; the dtype list; meshes of one or two axes inside the communicator, disjoint, sources first; at most one sharded
axis per side; equal global shapes and divisibility, which the library itself does not check; no more than 16 source
shards per destination shard; a tile that fits the staging bucket; a buffer exactly where the rank is in the mesh; all
ranks of the communicator calling in the same order with the same metadata; no use after destroy.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist

DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()
MAX_SOURCES = 16


class RuleBroken(RuntimeError):
    """What the library would answer with an error, a hang or wrong bytes."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise RuleBroken(text)


# ---- nccl.core -----------------------------------------------------------------------------------------------------


class UniqueId:
    def __init__(self) -> None:
        self.data = b""

    def __bytes__(self) -> bytes:
        return self.data

    def __setstate__(self, data: bytes) -> None:
        self.data = data


def get_unique_id() -> UniqueId:
    """The path of a file through which the ranks meet."""
    found = UniqueId()
    found.data = os.environ["M2N_STAND_IN_STORE"].encode()
    return found


class Communicator:
    def __init__(self, size: int, rank: int, path: str) -> None:
        self.size, self.rank, self.aborted, self.calls = size, rank, False, 0
        self._store = dist.FileStore(path, size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("m2n", self._store), rank, size, options)

    @classmethod
    def init(cls, size: int, rank: int, unique_id: UniqueId) -> Communicator:
        return cls(size, rank, bytes(unique_id).decode())

    def abort(self) -> None:
        self.aborted = True

    def agree(self, what: str) -> None:
        """All ranks make the same call at the same place in the order."""
        mine = torch.frombuffer(bytearray(hashlib.sha256(f"{self.calls} {what}".encode()).digest()), dtype=torch.uint8)
        self.calls += 1
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self.group.allgather([everyone], [mine]).wait(timedelta(seconds=10))
        _require(all(torch.equal(one, mine) for one in everyone), f"ranks call with different metadata: {what}")


# ---- nccl.m2n ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class Mesh:
    dims: tuple[int, ...]
    start_rank: int = 0

    @property
    def ranks(self) -> range:
        return range(self.start_rank, self.start_rank + prod(self.dims))


class DistTensor:
    def __init__(self, buffer, local_shape, dtype, *, mesh: Mesh, placements) -> None:
        self.buffer, self.local_shape, self.dtype = buffer, tuple(local_shape), str(dtype).removeprefix("torch.")
        self.mesh, self.placements = mesh, tuple(placements)
        _require(1 <= len(self.local_shape) <= 3, f"rank {len(self.local_shape)}")
        _require(all(extent > 0 for extent in self.local_shape), f"empty shard {self.local_shape}")
        _require(self.dtype in DTYPES, f"dtype {dtype}")
        _require(1 <= len(mesh.dims) <= 2 and len(self.placements) == len(mesh.dims), f"mesh {mesh}, {placements}")
        sharded = [(axis, p.dim) for axis, p in enumerate(self.placements) if isinstance(p, Shard)]
        _require(len(sharded) <= 1, "two sharded axes")
        self.axis, self.dim = sharded[0] if sharded else (None, None)
        _require(self.dim is None or 0 <= self.dim < len(self.local_shape), f"shard of dimension {self.dim}")
        if buffer is not None:
            _require(buffer.is_contiguous(), "a buffer that is not contiguous")
            _require(tuple(buffer.shape) == self.local_shape, f"buffer {tuple(buffer.shape)}, said {self.local_shape}")
            _require(str(buffer.dtype) == f"torch.{self.dtype}", f"buffer of {buffer.dtype}, said {self.dtype}")

    @property
    def shards(self) -> int:
        return 1 if self.axis is None else self.mesh.dims[self.axis]

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(extent * (self.shards if dim == self.dim else 1) for dim, extent in enumerate(self.local_shape))

    def described(self) -> list:
        return [self.global_shape, self.dtype, self.mesh.dims, self.mesh.start_rank, self.axis, self.dim]

    def place_of(self, rank: int) -> tuple[int, int]:
        """(shard, replica) of a rank of the mesh."""
        at = rank - self.mesh.start_rank
        if self.axis is None:
            return 0, at
        if len(self.mesh.dims) == 1:
            return at, 0
        first, second = divmod(at, self.mesh.dims[1])
        return (second, first) if self.axis == 1 else (first, second)

    def box_of(self, rank: int) -> list[tuple[int, int]]:
        shard, _ = self.place_of(rank)
        return [
            (extent * shard, extent * (shard + 1)) if dim == self.dim else (0, extent)
            for dim, extent in enumerate(self.local_shape)
        ]


class Handle:
    def __init__(self) -> None:
        self.alive = True
        self.calls: list[dict] = []
        size, slots = os.environ["NCCL_RESHARD_PACK_BUFFSIZES"].split(":")
        _require(int(slots) == 1, "slots")
        _require(size[-1] in "km", f"a staging bucket of {size}")
        self.bucket = int(size[:-1]) << {"k": 10, "m": 20}[size[-1]]
        _require(2 << 10 <= self.bucket < 4 << 30, f"a staging bucket of {self.bucket} bytes")

    def destroy(self) -> None:
        self.alive = False

    def reshard(self, comm: Communicator, src: DistTensor, dst: DistTensor, *, stream=None) -> None:
        _require(self.alive, "the handle was destroyed")
        if comm.aborted:
            raise RuntimeError("communicator was aborted")
        comm.agree(json.dumps([src.described(), dst.described()]))
        _require(src.global_shape == dst.global_shape, f"global shapes {src.global_shape}, {dst.global_shape}")
        _require(src.dtype == dst.dtype, "dtypes")
        _require(not set(src.mesh.ranks) & set(dst.mesh.ranks), "the meshes overlap")
        _require(src.mesh.start_rank < dst.mesh.start_rank, "the destination mesh comes first")
        _require(max(dst.mesh.ranks) < comm.size, "a mesh outside the communicator")
        itemsize = getattr(torch, src.dtype).itemsize
        tile = max(prod(src.local_shape) * itemsize, prod(dst.local_shape) * itemsize, 2 << 10)
        _require(tile <= self.bucket, f"a tile of {tile} bytes for a bucket of {self.bucket}")
        for side in (src, dst):
            _require((side.buffer is not None) == (comm.rank in side.mesh.ranks), "a buffer where there is no part")
        self.calls.append({"shape": src.global_shape, "src": src.described(), "dst": dst.described()})
        self._move(comm, src, dst)

    def _move(self, comm: Communicator, src: DistTensor, dst: DistTensor) -> None:
        for receiver in dst.mesh.ranks:
            _, replica = dst.place_of(receiver)
            parts = 0
            for sender in src.mesh.ranks:
                shard, copy = src.place_of(sender)
                copies = len(src.mesh.ranks) // src.shards
                if copy != (replica + shard) % copies:
                    continue
                box = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(src.box_of(sender), dst.box_of(receiver))]
                if any(a >= b for a, b in box):
                    continue
                parts += 1
                if comm.rank == sender:
                    part = _cut(src, sender, box).contiguous().view(-1).view(torch.uint8)
                    comm.group.send([part], receiver, 7).wait(timedelta(seconds=10))
                elif comm.rank == receiver:
                    part = _cut(dst, receiver, box)
                    got = torch.empty(part.numel() * part.element_size(), dtype=torch.uint8)
                    comm.group.recv([got], sender, 7).wait(timedelta(seconds=10))
                    part.copy_(got.view(part.dtype).view(part.shape))
            _require(parts <= MAX_SOURCES, f"{parts} source shards for one destination shard")


def _cut(side: DistTensor, rank: int, box: list[tuple[int, int]]) -> torch.Tensor:
    origin = side.box_of(rank)
    return side.buffer[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, origin))]


handles: list[Handle] = []


def init() -> Handle:
    handles.append(Handle())
    return handles[-1]
