"""Makes calls that cannot be interrupted in a helper thread, while the caller watches for news and the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")

POLL = 0.05
"""Seconds between two looks at ``failed`` while a call is in progress."""
NEWS_SECONDS = 1.0
"""How long a broken connection waits for its cause to be told."""


class Interrupted(Exception):
    """The caller gave up on a call: ``news`` is what it heard, None when the deadline passed. The thread is still in
    the call and is of no more use."""

    def __init__(self, news: str | None) -> None:
        super().__init__(news or "the deadline passed")
        self.news = news


class HelperThread:
    """One daemon thread, so that a call that never returns keeps neither its caller nor the interpreter's exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Callable[[], object], SimpleQueue] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def call(self, function: Callable[[], Result], deadline: float, failed: Callable[[], str | None]) -> Result:
        """What ``function`` returns or raises. Raises Interrupted with ``failed``'s text as soon as there is one, or
        when ``deadline`` (``time.monotonic()``) passes."""
        if self._thread is None:
            self._thread = Thread(target=_serve, args=(self._calls,), name=self._name, daemon=True)
            self._thread.start()
        answer: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        self._calls.put((function, answer))
        while True:
            try:
                result, error = answer.get(timeout=POLL)
            except Empty:
                news = failed()
                if news is not None:
                    raise Interrupted(news) from None
                if time.monotonic() > deadline:
                    raise Interrupted(None) from None
                continue
            if error is not None:
                raise error
            return result

    def close(self) -> None:
        """Let the thread end, after the call that it is in. A later call gets a thread and a queue of its own."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread, self._calls = None, SimpleQueue()


def heard(failed: Callable[[], str | None], seconds: float) -> str | None:
    """News that come within ``seconds``: a broken connection is seen before its cause is told."""
    until = time.monotonic() + seconds
    while (news := failed()) is None and time.monotonic() < until:
        time.sleep(POLL)
    return news


def _serve(calls: SimpleQueue) -> None:
    while (item := calls.get()) is not None:
        function, answer = item
        try:
            outcome = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        answer.put(outcome)
        del item, function, answer, outcome
