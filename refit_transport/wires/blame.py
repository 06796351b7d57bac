"""Finds the rank that holds up all others.

In lock-step a rank that stops stalls its peers, and these stall theirs, so the peer that a rank waits for is often a
victim too. When a rank gives up it says in the store whom it waits for; who is waited for and silent is the cause.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from threading import Thread

import torch.distributed as dist

LINGER_SECONDS = 3.0
"""How long the host of the store keeps it open after it gave up itself."""
_SECONDS = 1.2
"""Ranks share a deadline, so those that are alive speak up within a moment of each other."""
_POLL = 0.05


class Register:
    """One rank's entries in the store of a membership, for one refit."""

    def __init__(self, store: dist.Store, rank: int, version: int) -> None:
        self._store, self._rank, self._version = store, rank, version

    def through(self) -> None:
        """This rank has done its part of the refit: it holds up nobody."""
        self._say([])

    def give_up(self, waits_for: Iterable[int]) -> None:
        """This rank is alive, and waits for others."""
        Thread(target=self._say, args=(sorted(waits_for),), daemon=True).start()

    def culprit(self, waits_for: Iterable[int]) -> int | None:
        """The rank at the end of the chain of waits, None when every rank on it is alive. Takes at most a second or so;
        names the store's host, rank 0, when the store itself does not answer."""
        found: list[int | None] = []
        thread = Thread(target=lambda: found.append(self._look(sorted(waits_for))), daemon=True)
        thread.start()
        thread.join(_SECONDS + 0.3)
        return found[0] if found else 0

    def _say(self, waits_for: list[int]) -> None:
        try:
            self._store.set(f"state {self._rank}", json.dumps([self._version, waits_for]))
        except RuntimeError:
            """The store is gone, and with it whoever would read this."""

    def _look(self, waits_for: list[int]) -> int | None:
        try:
            return self._follow(waits_for)
        except RuntimeError:
            return None  # the host of the store has left: it cannot be asked, and it was not stopped

    def _follow(self, waits_for: list[int]) -> int | None:
        until = time.monotonic() + _SECONDS
        self._say(waits_for)
        alive, silent = {self._rank}, set(waits_for)
        while silent:
            for rank in sorted(silent):
                further = self._state(rank)
                if further is not None:
                    alive.add(rank)
                    silent |= set(further)
            silent -= alive
            if silent and time.monotonic() > until:
                return min(silent)
            time.sleep(_POLL)
        return None

    def _state(self, rank: int) -> list[int] | None:
        """Whom ``rank`` waits for in this refit, None while it has not said."""
        key = f"state {rank}"
        if not self._store.check([key]):
            return None
        version, waits_for = json.loads(self._store.get(key))
        return waits_for if version >= self._version else None
