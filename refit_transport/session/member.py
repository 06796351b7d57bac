"""One rank's membership of a session: join, agree on the plan, run refits as versioned transactions, leave.

The order of a session, the same on every rank:
  join      control connection, hellos compared
  describe  trainers report what they hold, then inference ranks what they need
  plan      every rank plans for itself; digests are compared before the first byte
  connect   wires listen, exchange endpoints, connect
  refit     begin -> transfer -> landed (all ranks; with verify: checksums compared) -> commit -> committed (all ranks);
            any number of times
A failure on any rank ends the session on every rank with the same text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import msgspec
import torch

from refit_transport.engines.base import WeightSink
from refit_transport.planning import compile_program
from refit_transport.planning.program import Program
from refit_transport.quantization.formats import format_named
from refit_transport.quantization.source import QuantizedSource
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.checksums import Checksums
from refit_transport.trainers.base import WeightSource
from refit_transport.transports.registry import DEFAULT, get_transport
from refit_transport.wires.base import Peer, Wire
from refit_transport.wires.select import make_wire

from .agreement import Agreement, PlanSummary, agree_on_plan, summarise_plan
from .control_client import ControlClient
from .errors import HandshakeError, RefitError
from .hello import Hello, check_hellos, introduce, label
from .report import RefitReport
from .totals import Expected, RankTotals, check_counts, expected_of, merge_totals
from .verification import VERIFY, compare

log = logging.getLogger("refit_transport.refit")

DEFAULT_TIMEOUT = 120.0


class EngineState(Enum):
    """What an inference rank's weights are."""

    FRESH = "fresh"
    """A complete version, which ``RefitMember.version`` names."""
    UPDATING = "updating"
    STALE = "stale"
    """Torn, or never refitted: it must not generate."""


class RefitMember:
    """Use ``RefitMember.join``. Single-threaded: one thread per rank calls it."""

    def __init__(
        self, client: ControlClient, hello: Hello, source: WeightSource | None, sink: WeightSink | None
    ) -> None:
        self._client, self.hello = client, hello
        self.source, self.sink = source, sink
        self.options = client.options
        self._wire: Wire | None = None
        self._binding: Binding | None = None
        self._expected: Expected | None = None
        self._checksums: Checksums | None = None
        self.agreement: Agreement | None = None
        self.state = EngineState.STALE
        self.version = -1

    @classmethod
    def join(
        cls,
        address: str,
        *,
        rank: int,
        role: str,
        source: WeightSource | None = None,
        sink: WeightSink | None = None,
        timeout: float | None = None,
        domain: str | None = None,
        labels: dict[str, str] | None = None,
        wire: Wire | None = None,
    ) -> RefitMember:
        """Join the session at ``address`` (``ControlServer.address``) as joint ``rank`` and block until all ranks
        agreed on the plan and are connected. ``role`` is ``trainer`` (give ``source``) or ``engine`` (give ``sink``).
        ``domain`` names the rank's fast-link domain; by default its host. ``wire`` replaces the wire that the
        session's options choose.

        Raises HandshakeError or RefitError within ``timeout`` seconds (the session's ``timeout_s`` when None), on every
        rank alike, naming the rank that could not join, and why.
        """
        if (role == "trainer") != (source is not None) or (role == "engine") != (sink is not None):
            raise ValueError(f"role={role!r}: a trainer joins with a source, an engine with a sink")
        started = time.monotonic()
        patience = timeout or DEFAULT_TIMEOUT
        client = ControlClient(address, rank, label(role, rank), started + patience)
        try:
            chosen = wire or make_wire(
                client.options.get("wire", "auto"), {"host": client.own_address, **client.options}
            )
            if client.options.get("domains") == "rank":
                domain = f"rank {rank}"
            hello = introduce(rank, role, wire=chosen.name, device=_device(), domain=domain, labels=labels or {})
            if source is not None and (form := format_named(client.options.get("quantize"))):
                source = QuantizedSource(source, form)
            member = cls(client, hello, source, sink)
            member._wire = chosen
            timeout = timeout or float(client.options.get("timeout_s", DEFAULT_TIMEOUT))
            member._set_up(timeout)
        except BaseException:
            client.close(bye=False)
            raise
        return member

    @property
    def rank(self) -> int:
        return self.hello.rank

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def _set_up(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._announced("joining"):
            hellos = self.exchange("hello", self.hello, list[Hello], deadline)
            check_hellos(hellos)
        with self._announced("planning"):
            transport = get_transport(self.options.get("transport"))
            self.agreement = agree_on_plan(self, hellos, transport, deadline)
            program = compile_program(self.agreement.plan, self.rank)
            self._expected = expected_of(program, self.agreement.whole)
            self._checksums = self._make_checksums(program)
            self._binding = Binding(
                self.agreement.plan, program, source=self.source, sink=self.sink, checksums=self._checksums
            )
        with self._announced("connecting"):
            self._connect(hellos, deadline)
        self.exchange("ready", None, list[None], deadline)

    def _make_checksums(self, program: Program) -> Checksums | None:
        verify = self.options.get("verify") or "none"
        if verify not in VERIFY:
            raise ValueError(f"verify is {verify!r}; allowed: {', '.join(VERIFY)}")
        return Checksums(program) if verify == "checksum" else None

    def _connect(self, hellos: Sequence[Hello], deadline: float) -> None:
        endpoints = self.exchange("endpoints", self._wire.listen(self.rank), list[dict[str, Any]], deadline)
        home = {rank: number for number, ranks in enumerate(self.agreement.plan.domains) for rank in ranks}
        peers = [
            Peer(h.rank, h.role, h.host, home[h.rank], h.pid, h.incarnation, endpoint)
            for h, endpoint in zip(hellos, endpoints)
        ]
        self._wire.connect(self.rank, peers, deadline)

    def exchange(self, name: str, payload: Any, kind: Any, deadline: float) -> list[Any]:
        """All-gather of plain data over the control connection; ``kind`` is the msgspec type of the whole list."""
        frames = self._client.all_gather(name, msgspec.msgpack.encode(payload), max(0.05, deadline - time.monotonic()))
        (item,) = kind.__args__
        return [msgspec.msgpack.decode(frame, type=item) for frame in frames]

    @contextmanager
    def _announced(self, phase: str):
        """Errors of this rank in the block reach every other rank, with rank and phase."""
        self._client.phase(phase)
        try:
            yield
        except RefitError as error:
            self._client.fail(str(error))
            raise
        except Exception as error:
            text = f"{self.hello.role} rank {self.rank} failed while {phase}: {type(error).__name__}: {error}"
            known = self._client.failed()
            self._client.fail(text)
            kind = HandshakeError if phase in ("joining", "planning") else RefitError
            raise kind(known or text) from error

    # ---- refits ----------------------------------------------------------------------------------------------------

    def refit(self, version: int, *, timeout: float | None = None) -> RefitReport:
        """Bring every engine to ``version``; collective over all members. Returns when every engine committed.

        Raises RefitError on every rank when any of them fails or ``timeout`` seconds (the session's ``timeout_s`` when
        None) pass; engines are STALE then, and the session is over.
        """
        if version <= self.version:
            raise ValueError(f"versions only grow: version {version} after version {self.version}")
        deadline = time.monotonic() + (timeout or float(self.options.get("timeout_s", DEFAULT_TIMEOUT)))
        try:
            with self._announced(f"refit to version {version}"):
                return self._transaction(version, deadline)
        except BaseException:
            self.state = EngineState.STALE
            self._abort()
            raise

    def _transaction(self, version: int, deadline: float) -> RefitReport:
        versions = self.exchange(f"refit {version}", version, list[int], deadline)
        if len(set(versions)) > 1:
            raise RefitError(f"ranks were asked for different versions: {sorted(set(versions))}")
        started = time.monotonic()
        self.state = EngineState.UPDATING
        self._binding.begin(version)
        stats = self._wire.run(self._binding, version, deadline, self._client.failed)
        landed = time.monotonic()
        check_counts(stats, self._expected, f"{self.hello.role} rank {self.rank}")
        self.exchange("landed", None, list[None], deadline)
        unchanged = self._checksums is not None and compare(self, self._checksums, deadline)
        verified = time.monotonic()
        if self.sink is not None:
            self.sink.commit(version)
        phases = {"transfer": landed - started, "commit": time.monotonic() - verified, **stats.seconds}
        if self._checksums is not None:
            phases["verify"] = self._checksums.seconds + verified - landed
        totals = RankTotals(
            role=self.hello.role,
            seconds=time.monotonic() - started,
            expected=self._expected,
            messages=stats.messages,
            peak_extra_bytes=self._binding.peak_extra_bytes,
            phases=phases,
        )
        everyones = self.exchange("committed", totals, list[RankTotals], deadline)
        report = self._report(version, everyones, self.version if unchanged else None)
        self.state, self.version = EngineState.FRESH, version
        if self.rank == 0:
            log.log(logging.WARNING if unchanged else logging.INFO, report.line())
        return report

    def _report(self, version: int, totals: Sequence[RankTotals], unchanged_since: int | None) -> RefitReport:
        return merge_totals(
            totals,
            version=version,
            transport=self.options.get("transport") or DEFAULT,
            wire=self._wire.name,
            unchanged_since=unchanged_since,
        )

    def _abort(self) -> None:
        if self.sink is not None:
            self.sink.abort()
        self._wire.close()

    def plan_summary(self) -> PlanSummary:
        """What was agreed on, for whoever coordinates the session."""
        return summarise_plan(self.agreement)

    def failed(self) -> str | None:
        """A failure anywhere in the session, learnt without blocking; None while it is sound."""
        return self._client.failed()

    def leave(self) -> None:
        """Close wire and control connection. Safe at any time, also twice."""
        if self._wire is not None:
            self._wire.close()
        self._client.close()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
