"""The golden check: runs every program of a plan on hashed elements and compares all destinations. Slow and plain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from refit_transport.layout.layout import ITEMSIZE, SideDescription
from refit_transport.layout.region import Region

from .compile import compile_program
from .plan import Plan, PlanError
from .program import Message, Program


def check_plan(plan: Plan, source: SideDescription, sink: SideDescription) -> None:
    """Simulates a refit through all hops of every rank's program.

    Every element is a hash of (parameter, global index), so a wrong, missing, doubled or misplaced one shows. Raises
    PlanError with the parameter, the rank and the region. For small plans: each rank's tensors are held in full.
    """
    simulation = _Simulation.of(plan, source, sink)
    for bucket in range(len(plan.buckets)):
        simulation.run(bucket)
    simulation.compare()


def _hashes(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """uint64 [shape]."""
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64)
    seed = np.uint64((number + 1) * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (index + seed) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(31))).reshape(shape)


def _coverage(side: SideDescription, shapes: dict[str, tuple[int, ...]]) -> dict[tuple[int, str], np.ndarray]:
    """By (rank, name): which elements the rank holds or needs, bool [shape]."""
    masks: dict[tuple[int, str], np.ndarray] = {}
    for entry in side.entries:
        for cell in side.layout_of(entry).cells:
            for rank in cell.ranks:
                mask = masks.setdefault((rank, entry.name), np.zeros(shapes[entry.name], bool))
                mask[cell.region.slices()] = True
    return masks


@dataclass(slots=True)
class _Packed:
    """One piece on its way."""

    name: str
    offset: int
    nbytes: int
    data: np.ndarray


@dataclass(slots=True)
class _Simulation:
    plan: Plan
    programs: dict[int, Program]
    full: dict[str, np.ndarray]
    """The right elements by parameter, uint64."""
    held: dict[tuple[int, str], np.ndarray]
    needed: dict[tuple[int, str], np.ndarray]
    values: dict[tuple[int, str], np.ndarray]
    writes: dict[tuple[int, str], np.ndarray]
    whole: dict[tuple[int, str], int]
    """(rank, name) of the whole tensors that are still to be announced: their bytes."""
    received: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By (rank, row), for the bucket that is running."""

    @classmethod
    def of(cls, plan: Plan, source: SideDescription, sink: SideDescription) -> _Simulation:
        shapes = {p.name: p.shape for p in plan.parameters}
        needed = _coverage(sink, shapes)
        whole = {
            (rank, entry.name): int(np.prod(shapes[entry.name], dtype=np.int64)) * ITEMSIZE[entry.dtype]
            for entry in sink.entries
            if entry.whole
            for rank in sink.layout_of(entry).ranks
        }
        return cls(
            plan,
            {rank: compile_program(plan, rank) for rank in plan.world},
            {p.name: _hashes(number, p.shape) for number, p in enumerate(plan.parameters)},
            _coverage(source, shapes),
            needed,
            {key: np.zeros(mask.shape, np.uint64) for key, mask in needed.items()},
            {key: np.zeros(mask.shape, np.int64) for key, mask in needed.items()},
            whole,
        )

    def run(self, bucket: int) -> None:
        self.received.clear()
        for rank, program in self.programs.items():
            part = program.buckets[bucket]
            for row in range(*part.local):
                self._store(rank, *self._piece(program, row), self._own(program, row))
            staged = sum(message.nbytes for message in (*part.sends, *part.recvs))
            if staged > self.plan.options.fill_bytes:
                raise PlanError(f"rank {rank} stages {staged} bytes in bucket {bucket}")
        parts = [program.buckets[bucket] for program in self.programs.values()]
        for hop in sorted({message.hop for part in parts for message in (*part.sends, *part.recvs)}):
            self._exchange(bucket, hop)
        for rank, program in self.programs.items():
            for parameter, nbytes in program.buckets[bucket].whole:
                name = self.plan.parameters[parameter].name
                if self.whole.pop((rank, name), None) != nbytes or not (self.writes.get((rank, name), 1) == 1).all():
                    raise PlanError(f"{name}: not complete on rank {rank} when bucket {bucket} says so")

    def _exchange(self, bucket: int, hop: int) -> None:
        sent: dict[tuple[int, int], list[_Packed]] = {}
        for rank, program in self.programs.items():
            for message in (m for m in program.buckets[bucket].sends if m.hop == hop):
                if (rank, message.peer) in sent:
                    raise PlanError(f"rank {rank} sends two messages to {message.peer} in bucket {bucket}, hop {hop}")
                sent[rank, message.peer] = [self._pack(program, row) for row in range(message.first, message.last)]
        for rank, program in self.programs.items():
            for message in (m for m in program.buckets[bucket].recvs if m.hop == hop):
                self._unpack(program, message, sent.pop((message.peer, rank), []))
        if sent:
            raise PlanError(f"messages {sorted(sent)} of bucket {bucket}, hop {hop} are received by nobody")

    def _piece(self, program: Program, row: int) -> tuple[str, Region]:
        parameter = self.plan.parameters[program.pieces.parameter[row]]
        ndim = len(parameter.shape)
        start, stop = program.pieces.start[row].tolist(), program.pieces.stop[row].tolist()
        if any(pair != (0, 1) for pair in zip(start[ndim:], stop[ndim:])):
            raise PlanError(f"{parameter.name}: piece {row} of rank {program.rank} is not padded with [0, 1)")
        return parameter.name, Region(tuple(start[:ndim]), tuple(stop[:ndim]))

    def _own(self, program: Program, row: int) -> np.ndarray:
        name, region = self._piece(program, row)
        mask = self.held.get((program.rank, name))
        if mask is None or not mask[region.slices()].all():
            raise PlanError(f"{name}: rank {program.rank} is to send {region}, which it does not hold")
        return self.full[name][region.slices()]

    def _pack(self, program: Program, row: int) -> _Packed:
        origin = int(program.pieces.origin[row])
        name, _ = self._piece(program, row)
        if origin < 0:
            data = self._own(program, row)
        elif self._piece(program, origin) != self._piece(program, row):
            raise PlanError(f"{name}: rank {program.rank} forwards another region than it received")
        elif (program.rank, origin) not in self.received:
            raise PlanError(f"{name}: rank {program.rank} forwards piece {row} before it has arrived")
        else:
            data = self.received[program.rank, origin]
        return _Packed(name, int(program.pieces.offset[row]), int(program.pieces.nbytes[row]), data)

    def _unpack(self, program: Program, message: Message, packed: list[_Packed]) -> None:
        rank, end = program.rank, 0
        if len(packed) != message.last - message.first:
            raise PlanError(
                f"rank {rank} expects {message.last - message.first} pieces of {message.peer}: {len(packed)}"
            )
        for row, piece in zip(range(message.first, message.last), packed):
            name, region = self._piece(program, row)
            place = int(program.pieces.offset[row]), int(program.pieces.nbytes[row])
            if (name, *place, region.shape) != (piece.name, piece.offset, piece.nbytes, piece.data.shape):
                raise PlanError(f"{name}: rank {rank} and its peer {message.peer} disagree about piece {row}")
            if place[0] != end or place[0] % (place[1] // region.numel):
                raise PlanError(f"{name}: piece {row} of rank {rank} is not packed tightly and aligned")
            end += place[1]
            self.received[rank, row] = piece.data
            if program.pieces.wanted[row]:
                self._store(rank, name, region, piece.data)
        if end != message.nbytes:
            raise PlanError(f"rank {rank}: message of {message.peer} has {message.nbytes} bytes, its pieces {end}")

    def _store(self, rank: int, name: str, region: Region, data: np.ndarray) -> None:
        if (rank, name) not in self.needed:
            raise PlanError(f"{name}: rank {rank} receives {region} but needs nothing of it")
        self.values[rank, name][region.slices()] = data
        self.writes[rank, name][region.slices()] += 1

    def compare(self) -> None:
        """Every needed element has been written once and is right, no other has been written, and every whole tensor
        has been announced."""
        for (rank, name), mask in self.needed.items():
            writes = self.writes[rank, name]
            for wrong, what in ((mask & (writes == 0), "never written"), (writes > mask, "written too often")):
                if wrong.any():
                    raise PlanError(f"{name}: element {np.argwhere(wrong)[0].tolist()} on rank {rank} is {what}")
            differs = mask & (self.values[rank, name] != self.full[name])
            if differs.any():
                raise PlanError(f"{name}: element {np.argwhere(differs)[0].tolist()} on rank {rank} has a wrong value")
        if self.whole:
            raise PlanError(f"whole tensors that no bucket completes: {sorted(self.whole)[:5]}")
