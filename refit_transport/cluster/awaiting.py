"""Waiting for several actors together: the first failure ends the wait, and every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from .errors import ClusterError


def await_all(calls: Sequence[tuple[str, ray.ObjectRef]], doing: str, timeout: float) -> list[Any]:
    """Results of ``(actor's name, reference)`` pairs, in order. Raises ClusterError as soon as one of them fails (an
    actor's death is seen within a fraction of a second), or after ``timeout`` seconds, naming who did not answer."""
    deadline = time.monotonic() + timeout
    names = {ref: name for name, ref in calls}
    pending = list(names)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            late = ", ".join(names[ref] for ref in pending)
            raise ClusterError(f"{doing}: no answer within {timeout:g} s from {late}")
        for ref in done:
            _raise_failure(names[ref], ref, doing)
    return [ray.get(ref, timeout=1) for _, ref in calls]


def _raise_failure(name: str, ref: ray.ObjectRef, doing: str) -> None:
    try:
        ray.get(ref, timeout=1)
    except RayActorError as error:
        raise ClusterError(f"{name} died while {doing}: {_first_line(error)}") from error
    except RayTaskError as error:
        cause = error.cause if error.cause is not None else error
        raise ClusterError(f"{name} failed while {doing}: {type(cause).__name__}: {_first_line(cause)}") from error
    except GetTimeoutError as error:
        raise ClusterError(f"{name} answered while {doing}, but its result could not be fetched") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
