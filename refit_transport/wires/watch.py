"""Watches the control connection and the deadline in a thread, while the caller may be stuck in a call that waits for
a device: an engine that loads a tensor whose bytes never come can only be freed by aborting the communicator."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Self

_POLL = 0.05


class Watch:
    """A context around one refit. While it is open only its thread calls ``failed``, and ``release`` at most once: on
    the first news, or when ``deadline`` passes."""

    def __init__(self, failed: Callable[[], str | None], deadline: float, release: Callable[[], None]) -> None:
        self._failed, self._deadline, self._release = failed, deadline, release
        self._stop = Event()
        self._news: str | None = None
        self.released = False
        """Whether ``release`` was called: what the device says from then on is worth nothing."""
        self._thread = Thread(target=self._look, name="refit-watch", daemon=True)

    def news(self) -> str | None:
        """What another rank reported, None while all is well."""
        return self._news

    def _look(self) -> None:
        while not self._stop.wait(_POLL):
            try:
                self._news = self._failed()
            except Exception as error:
                self._news = str(error)
            if self._news is not None or time.monotonic() > self._deadline:
                self.released = True
                self._release()
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if not self.released:
            self._thread.join()
