"""Sessions between FSDP2 ranks and vLLM engines, in this process or in one of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refit_transport.cluster.orphans import DIE_WITH_PARENT
from refit_transport.session.control_server import ControlServer
from tests.engines.vllm_engines import start_engine
from tests.equality.trainer_ranks import DEADLINE_S, LIFE_S, TrainerRanks

Call = Callable[..., Any]


class LocalReplica:
    """An engine that this process drives. ``end`` runs the call: end it after those of other processes began."""

    def __init__(self, llm: Any, workers: int = 1) -> None:
        self.llm, self.workers = llm, workers

    def begin(self, call: Call, *args: Any) -> None:
        self._call = call, args

    def end(self) -> Any:
        call, args = self._call
        return call(self.llm, *args)


class ReplicaProcess:
    """An engine, or a data-parallel core of one, in a process of its own, started with the options of
    ``start_engine`` and ``env`` added to its environment."""

    workers = 1

    def __init__(self, path: Path, env: Mapping[str, str] | None = None, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        args = (there, path, dict(env or {}), options)
        # A daemon may have no processes of its own, which a core of several workers needs.
        self._process = context.Process(target=_serve_engine, args=args, daemon=env is None)
        self._process.start()
        there.close()

    def begin(self, call: Call, *args: Any) -> None:
        self._pipe.send((call, args))

    def end(self, deadline: float = DEADLINE_S) -> Any:
        if not self._pipe.poll(deadline):
            raise AssertionError("the engine's process does not answer")
        ok, value = self._pipe.recv()
        assert ok, value
        return value

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve_engine(pipe: Any, path: Path, env: dict[str, str], options: dict[str, Any]) -> None:
    signal.alarm(LIFE_S)
    os.environ.update({DIE_WITH_PARENT: "1", **env})
    llm = start_engine(path, **options)
    while True:
        call, args = pipe.recv()
        try:
            pipe.send((True, call(llm, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def ask(replica: Any, call: Call, *args: Any) -> Any:
    replica.begin(call, *args)
    return replica.end()


def join(llm: Any, info: dict[str, Any]) -> None:
    llm.init_weight_transfer_engine({"init_info": info})


def refit(llm: Any, version: int) -> tuple[list[dict[str, Any]], str]:
    """What a driver does for a refit. Returns the workers' status and the label of the weights."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "timeout": 60.0}})
    llm.finish_weight_update(str(version))
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()
    return llm.collective_rpc("refit_status"), llm.get_weight_version()


def leave(llm: Any) -> None:
    llm.shutdown_weight_transfer_engine()


def fingerprints(llm: Any) -> list[dict[str, str]]:
    """Per worker."""
    return llm.collective_rpc("weight_fingerprint")


class Refits:
    """A session that all members joined."""

    def __init__(self, trainers: TrainerRanks, replicas: Sequence[Any], arrivals: list[tuple]) -> None:
        self.trainers, self.replicas, self.arrivals = trainers, replicas, arrivals
        """Arrivals as ``_Rank.join`` returns them."""
        self.version = 0
        self.report: dict[str, Any] = {}
        self.sent: dict[str, int] = {}
        """By all trainers in the last refit, by link, as the wire counted it."""

    def bring(self, which: str) -> None:
        """All engines receive ``which``, and say so."""
        self.version += 1
        answers = _together(
            (self.trainers, "refit", which, self.version), *((each, refit, self.version) for each in self.replicas)
        )
        reports, sent = zip(*answers[0], strict=True)
        self.report = reports[0]
        self.sent = {link: sum(counts[link] for counts in sent) for link in sent[0]}
        assert all(report == self.report for report in reports)
        for status, label in answers[1:]:
            assert {(s["state"], s["version"]) for s in status} == {("fresh", self.version)}
            assert label == str(self.version)


@contextmanager
def session(trainers: TrainerRanks, replicas: Sequence[Any], **options: Any) -> Iterator[Refits]:
    """Trainers have the joint ranks from 0 on, then the workers of each replica. Trainers are one domain, engines
    another."""
    workers = [replica.workers for replica in replicas]
    server = ControlServer(trainers.world_size + sum(workers), {"timeout_s": 60.0, **options})
    infos = [
        {
            "address": server.address,
            "engine": index,
            "rank_offset": trainers.world_size + sum(workers[:index]),
            "domain": "engines",
        }
        for index in range(len(replicas))
    ]
    try:
        arrivals, *_ = _together(
            (trainers, "join", server.address),
            *((each, join, info) for each, info in zip(replicas, infos, strict=True)),
        )
        yield Refits(trainers, replicas, arrivals[0])
    finally:
        _together((trainers, "leave"), *((each, leave) for each in replicas))
        server.close()


def _together(*calls: tuple) -> list[Any]:
    """Every (party, call, *arguments) at once; answers in order. All are waited for, whatever fails."""
    for party, *call in calls:
        party.begin(*call)
    answers, failures = [], []
    for party, *_ in sorted(calls, key=lambda call: not isinstance(call[0], LocalReplica)):
        try:
            answers.append((party, party.end()))
        except Exception as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("parties of the session failed", failures)
    return [next(answer for party, answer in answers if party is asked) for asked, *_ in calls]
