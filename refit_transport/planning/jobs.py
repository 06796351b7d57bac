"""Prepares groups for routing: cuts atoms and finds demands, once per kind of layout pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from refit_transport.layout.layout import LogicalParameter, SideDescription

from .atoms import Atoms, CoverageError, cut_atoms
from .balance import Candidates
from .demand import Demand, Pattern, code, demand_of, pattern_of
from .fabric import Fabric
from .groups import GroupSpec
from .plan import PlanError
from .supply import Supply, own_copies

ONE_CHAIN = 1
NOBODY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """The rank through which a broadcast goes."""

    rank: int
    code: int | None
    """Its slot code, if it holds a part itself."""
    needs: np.ndarray
    """bool [atoms]: what it must store itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A group on its way through the planner."""

    spec: GroupSpec
    demand: Demand
    holders: tuple[Candidates, ...]
    """Joint ranks behind ``demand.holders``."""
    slot_ranks: np.ndarray
    """int64 [slots]."""
    key: tuple[object, ...]
    """Jobs of equal key differ in their slots' ranks only."""
    root: Root | None = None

    @property
    def weight(self) -> int:
        """Bytes that travel for one element of the group's shape."""
        return self.spec.itemsize * len(self.spec.members)

    def sending(self) -> Iterator[tuple[int, dict[int, int]]]:
        """(holder set, {copies: elements}) of what holders send out of their domain, or to the root."""
        for number, by_copies in self.demand.sending.items():
            if self.root is None:
                yield number, by_copies
            elif self.demand.holders[number] != (self.root.code,):
                yield number, {ONE_CHAIN: sum(by_copies.values())}

    def lending(self) -> Iterator[tuple[int, Candidates, int]]:
        """(position in ``demand.near``, holders, elements)."""
        numel = self.demand.atoms.numel
        for position, (_, codes, atoms) in enumerate(self.demand.near):
            yield position, tuple(self.slot_ranks[[-c - 1 for c in codes]].tolist()), int(numel[atoms].sum())

    def own_copies(self, shares: Mapping[Candidates, float], relay: str) -> dict[int, dict[int, int]]:
        """``{holder set: {copies needed: copies that the holders (or the root) send themselves}}``."""
        if self.root is not None:
            return {
                number: {copies: copies if relay == "never" else ONE_CHAIN for copies in by_copies}
                for number, by_copies in self.demand.sending.items()
            }
        return {
            number: {copies: own_copies(shares[self.holders[number]], copies) for copies in by_copies}
            for number, by_copies in self.demand.sending.items()
        }

    def add_sent(self, supply: Supply, relay: str) -> None:
        """Adds what this job's holders send to other domains."""
        for number, by_copies in self.sending():
            for copies, elements in by_copies.items():
                supply.send(self.holders[number], copies, elements * self.weight)
        if self.root is not None:
            for by_copies in self.demand.sending.values():
                for copies, elements in by_copies.items():
                    supply.send((self.root.rank,), copies if relay == "never" else ONE_CHAIN, elements * self.weight)

    def add_received(self, supply: Supply, weight: int) -> None:
        """Adds what is received if an element has ``weight`` bytes; the same ranks for all jobs of one key."""
        for ranks, elements in zip(self.demand.receivers, self.demand.receiving):
            supply.receive(ranks, elements * weight)
        for _, holders, elements in self.lending():
            supply.lend(holders, elements * weight)


def total_supply(jobs: Sequence[Job], relay: str) -> Supply:
    """What a whole plan sends and receives."""
    supply = Supply()
    weights: dict[tuple[object, ...], tuple[Job, int]] = {}
    for job in jobs:
        job.add_sent(supply, relay)
        first, weight = weights.get(job.key, (job, 0))
        weights[job.key] = first, weight + job.weight
    for job, weight in weights.values():
        job.add_received(supply, weight)
    return supply


@dataclass(slots=True)
class JobMaker:
    """Makes jobs and keeps what equal kinds of layout pairs have in common."""

    source: SideDescription
    sink: SideDescription
    fabric: Fabric
    through_root: bool
    """Whole tensors go through the lowest trainer rank."""
    parameters: tuple[LogicalParameter, ...]
    _patterns: dict[int, tuple[int, Pattern, np.ndarray]] = field(default_factory=dict, init=False)
    _numbers: dict[Pattern, int] = field(default_factory=dict, init=False)
    _atoms: dict[tuple[int, int], Atoms] = field(default_factory=dict, init=False)
    _demands: dict[tuple[object, ...], Demand] = field(default_factory=dict, init=False)
    _domains: dict[tuple[bool, int], set[int]] = field(default_factory=dict, init=False)

    def make(self, spec: GroupSpec) -> Job:
        """Raises PlanError, naming a parameter, when its destination is not covered exactly once."""
        number, _, slot_ranks = self._pattern(spec.src_layout)
        atoms = self._cut(spec, number)
        if spec.whole and self.through_root:
            return self._root_job(spec, number, atoms, slot_ranks)
        holders = tuple(tuple(slot_ranks[list(slots)].tolist()) for slots in atoms.holder_sets)
        shared = self._domains_of(True, spec.src_layout) & self._domains_of(False, spec.dst_layout)
        key = (number, spec.dst_layout, tuple(slot_ranks.tolist()) if shared else None)
        if key not in self._demands:
            codes = [tuple(map(code, slots)) for slots in atoms.holder_sets]
            self._demands[key] = demand_of(atoms, codes, holders if shared else None, self.fabric)
        return Job(spec, self._demands[key], holders, slot_ranks, key)

    def _root_job(self, spec: GroupSpec, number: int, atoms: Atoms, slot_ranks: np.ndarray) -> Job:
        """All other ranks are served by the root, so where the holders are makes no difference to them."""
        root = min((layout.ranks[0] for layout in self.source.layouts if layout.cells), default=NOBODY)
        slot = np.flatnonzero(slot_ranks == root)
        root_code = code(int(slot[0])) if len(slot) else None
        key = (number, spec.dst_layout, "root", root_code)
        if key not in self._demands:
            others = tuple(tuple(rank for rank in needers if rank != root) for needers in atoms.needer_sets)
            rest = Atoms(atoms.start, atoms.stop, atoms.holders, atoms.needers, atoms.holder_sets, others)
            codes = [tuple(map(code, slots)) for slots in atoms.holder_sets]
            codes = [(root_code,) if root_code in some else some for some in codes]
            self._demands[key] = demand_of(rest, codes, None, self.fabric)
        demand = self._demands[key]
        needs = np.array([root in needers for needers in atoms.needer_sets], bool)[atoms.needers]
        holders = tuple(tuple(slot_ranks[[-c - 1 for c in codes]].tolist()) for codes in demand.holders)
        return Job(spec, demand, holders, slot_ranks, key, Root(root, root_code, needs))

    def _pattern(self, layout: int) -> tuple[int, Pattern, np.ndarray]:
        if layout not in self._patterns:
            pattern, slots = pattern_of(self.source.layouts[layout])
            number = self._numbers.setdefault(pattern, len(self._numbers))
            self._patterns[layout] = number, pattern, np.array(slots, np.int64)
        return self._patterns[layout]

    def _cut(self, spec: GroupSpec, number: int) -> Atoms:
        key = number, spec.dst_layout
        if key not in self._atoms:
            try:
                pattern = self._pattern(spec.src_layout)[1]
                self._atoms[key] = cut_atoms(spec.shape, pattern, self.sink.layouts[spec.dst_layout].cells)
            except CoverageError as error:
                raise PlanError(f"{self.parameters[spec.members[0]].name}: {error}") from None
        return self._atoms[key]

    def _domains_of(self, source: bool, layout: int) -> set[int]:
        key = source, layout
        if key not in self._domains:
            ranks = (self.source if source else self.sink).layouts[layout].ranks
            self._domains[key] = set(self.fabric.domain_of[list(ranks)].tolist())
        return self._domains[key]
