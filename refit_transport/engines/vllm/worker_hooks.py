"""Reaches the vLLM worker that owns a weight-transfer engine, which vLLM does not hand to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def constructing_worker() -> Any | None:
    """The worker whose ``load_model`` is on the call stack, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "weight_transfer_engine") and hasattr(owner, "execute_model"):
            return owner
        frame = frame.f_back
    return None


def guard_execution(worker: Any, refusal: Callable[[], str | None]) -> None:
    """Make ``worker`` raise RuntimeError instead of computing requests while ``refusal`` returns a text. Warm-up and
    the idle steps of data parallelism are not requests.

    The last line of defence: vLLM ends an engine whose step raises. Whoever drives the engine asks ``refit_status``
    before it generates."""
    execute = worker.execute_model

    @wraps(execute)
    def execute_if_fresh(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens and (text := refusal()) is not None:
            raise RuntimeError(text)
        return execute(scheduler_output, *args, **kwargs)

    worker.execute_model = execute_if_fresh


def end_weight_update(worker: Any) -> None:
    """Close the bracket that ``start_weight_update`` opened on ``worker``, as vLLM does where an update raises."""
    worker._weight_update_active = False
