"""Ranks as processes: forked with torch imported, each in its network namespace, driven by calls over a pipe."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from .netlab import enter_namespace

STOP_SECONDS = 5.0
"""How long ranks may take to leave by themselves."""


class RankError(RuntimeError):
    """A rank raised, died, or did not answer in time. Names the rank and the call."""


class Ranks:
    """One process per joint rank, each with its own object made by ``build(rank)``; ``call`` invokes a method on all.

    Use as a context manager: the processes are gone when it ends.
    """

    def __init__(
        self, ranks: Sequence[int], build: Callable[[int], Any], namespaces: Mapping[int, str] | None = None
    ) -> None:
        self.ranks = tuple(ranks)
        self.stop_seconds = STOP_SECONDS
        self._build, self._namespaces = build, namespaces or {}
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def __enter__(self) -> Ranks:
        torch.set_num_threads(1)
        context = get_context("fork")
        try:
            for rank in self.ranks:
                self._pipes[rank], theirs = context.Pipe()
                process = context.Process(
                    target=self._serve, args=(rank, theirs), name=f"bench-rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._processes[rank] = process
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def call(
        self, method: str, *args: Any, seconds: float = 120.0, only: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Result of ``method(*args)`` on every rank (or those in ``only``), run at the same time.
        Raises RankError when a rank raises or dies, or when ``seconds`` pass."""
        waiting = {self._pipes[rank]: rank for rank in (self.ranks if only is None else only)}
        for pipe, rank in waiting.items():
            self._send(pipe, rank, (method, args))
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"{method}: no answer from ranks {sorted(waiting.values())} within {seconds:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._receive(pipe, rank, method)
        return dict(sorted(results.items()))

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def close(self) -> None:
        """Ask every rank to leave, then kill those that stay."""
        for pipe in self._pipes.values():
            pipe.close()
        deadline = time.monotonic() + self.stop_seconds
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes.clear()
        self._processes.clear()

    def _send(self, pipe: Connection, rank: int, message: object) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise RankError(f"rank {rank} is gone: {error}") from error

    def _receive(self, pipe: Connection, rank: int, method: str) -> Any:
        try:
            failed, value = pipe.recv()
        except (EOFError, OSError) as error:
            raise RankError(f"rank {rank} died in {method} (exit {self._processes[rank].exitcode})") from error
        if failed:
            raise RankError(f"rank {rank} failed in {method}:\n{value}")
        return value

    def _serve(self, rank: int, pipe: Connection) -> None:
        """The child: answer calls until the pipe closes."""
        # A forked process makes torch's thread pool anew at the first use. Threads that are first together find none.
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The parent's ends, this rank's among them: a pipe ends only when nobody holds its other end.
        for inherited in self._pipes.values():
            inherited.close()
        try:
            if rank in self._namespaces:
                enter_namespace(self._namespaces[rank])
            worker = self._build(rank)
            while True:
                method, args = pipe.recv()
                pipe.send(_attempt(getattr(worker, method), args))
        except (EOFError, OSError):
            pass
        except BaseException:
            pipe.send((True, traceback.format_exc()))
        finally:
            os._exit(0)


def _attempt(method: Callable[..., Any], args: Sequence[Any]) -> tuple[bool, Any]:
    try:
        return False, method(*args)
    except Exception:
        return True, traceback.format_exc()
