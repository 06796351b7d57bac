"""Compares the sums of what was sent and of what arrived, on every rank, before anything is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from refit_transport.planning import compile_program
from refit_transport.planning.plan import Plan
from refit_transport.runtime.checksums import Checksums, rows_by_peer

from .errors import RefitError
from .hello import Hello

if TYPE_CHECKING:
    from .member import RefitMember

VERIFY = ("none", "checksum")
_NAMED = 5


class RankSums(msgspec.Struct, frozen=True):
    """One rank's digests by peer, and whether every sum is that of the refit before."""

    sent: dict[int, bytes]
    received: dict[int, bytes]
    unchanged: bool


Pair = tuple[int, int]
"""Sender and receiver."""


def compare(member: RefitMember, checksums: Checksums, deadline: float) -> bool:
    """Collective. Returns whether no byte of the refit differs from the one before. Raises RefitError, on every rank
    with the same text, that names each parameter that arrived otherwise than it was sent."""
    checksums.finish()
    own = RankSums(checksums.digests(sent=True), checksums.digests(sent=False), checksums.unchanged)
    ranks = member.exchange("checksums", own, list[RankSums], deadline)
    damaged = [
        (sender, receiver)
        for receiver, sums in enumerate(ranks)
        for sender in sorted(sums.received.keys() | {s for s, other in enumerate(ranks) if receiver in other.sent})
        if sums.received.get(sender) != ranks[sender].sent.get(receiver)
    ]
    if damaged:
        raise RefitError(_name(member, checksums, damaged, deadline))
    return all(sums.unchanged for sums in ranks)


def _name(member: RefitMember, checksums: Checksums, damaged: list[Pair], deadline: float) -> str:
    """Exchanges the sums of the pieces between ``damaged`` pairs and describes those that differ."""
    own = [
        (
            checksums.between(receiver, sent=True) if sender == member.rank else [],
            checksums.between(sender, sent=False) if receiver == member.rank else [],
        )
        for sender, receiver in damaged
    ]
    ranks = member.exchange("differing checksums", own, list[list[tuple[list[int], list[int]]]], deadline)
    plan, hellos = member.agreement.plan, member.agreement.hellos
    found = []
    for number, (sender, receiver) in enumerate(damaged):
        found += _differing(plan, hellos, sender, receiver, ranks[sender][number][0], ranks[receiver][number][1])
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "weights changed on the way: " + "; ".join(found[:_NAMED]) + more


def _differing(
    plan: Plan, hellos: tuple[Hello, ...], sender: int, receiver: int, sent: list[int], received: list[int]
) -> list[str]:
    program = compile_program(plan, receiver)
    rows = rows_by_peer(program, sent=False)[sender]
    ends = " to ".join(f"{hellos[rank].role} rank {rank}" for rank in (sender, receiver))
    table = program.pieces
    found = []
    for row, before, after in zip(rows, sent, received, strict=True):
        if before != after:
            parameter = plan.parameters[table.parameter[row]]
            box = zip(table.start[row].tolist(), table.stop[row].tolist(), strict=True)
            region = ", ".join(f"{a}:{b}" for a, b in list(box)[: len(parameter.shape)])
            found.append(f"{parameter.name} [{region}] from {ends} ({before:016x} sent, {after:016x} arrived)")
    return found
