"""Waiting for several actors together: a failure ends the wait and names its cause, and every wait has a deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from .errors import ClusterError

_DEATH_S = 3.0
"""Seconds within which Ray notices that an actor's process has ended."""

_ERROR = re.compile(r"(\S+ )?[A-Za-z_.]*(Error|Exception)\b.*: .+")


def await_all(calls: Sequence[tuple[str, ray.ObjectRef]], doing: str, timeout: float) -> list[Any]:
    """Results of ``(actor's name, reference)`` pairs, in order. Raises ClusterError when one of them fails, or after
    ``timeout`` seconds, naming who did not answer. An actor's death ends the wait at once. After any other failure the
    rest get three seconds: where a death made a collective of the others fail, the error names the one that died."""
    deadline = time.monotonic() + timeout
    names = {ref: name for name, ref in calls}
    pending = list(names)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            late = ", ".join(names[ref] for ref in pending)
            raise ClusterError(f"{doing}: no answer within {timeout:g} s from {late}")
        failure = _failure(done[0])
        if failure is not None:
            failed, failure = _cause(done[0], failure, pending)
            raise ClusterError(_described(names[failed], failure, doing)) from failure
    return [ray.get(ref, timeout=1) for _, ref in calls]


def _failure(ref: ray.ObjectRef) -> Exception | None:
    """What a finished call failed with."""
    try:
        ray.get(ref, timeout=1)
    except (RayActorError, RayTaskError, GetTimeoutError) as error:
        return error
    return None


def _cause(failed: ray.ObjectRef, failure: Exception, pending: list) -> tuple[ray.ObjectRef, Exception]:
    """The call to blame: the first that failed, unless another's actor died. The peers of a killed process see their
    connection closed, and say so, before Ray has noticed the death."""
    deadline = time.monotonic() + _DEATH_S
    while pending and not isinstance(failure, RayActorError):
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            break
        other = _failure(done[0])
        if isinstance(other, RayActorError):
            return done[0], other
    return failed, failure


def _described(name: str, failure: Exception, doing: str) -> str:
    if isinstance(failure, RayActorError):
        return f"{name} died while {doing}: {_first_line(failure)}{_log_of(name)}"
    if isinstance(failure, RayTaskError):
        cause = failure.cause if failure.cause is not None else failure
        return f"{name} failed while {doing}: {type(cause).__name__}: {_first_line(cause)}{_log_of(name)}"
    return f"{name} answered while {doing}, but its result could not be fetched"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _log_of(name: str) -> str:
    """Where the actor's own log is, and its last line that names an error; the actor's pid is in its name."""
    pid = re.search(r"pid (\d+)", name)
    node = ray._private.worker.global_worker.node
    if not pid or node is None:
        return ""
    for log in Path(node.get_logs_dir_path()).glob(f"worker-*-{pid[1]}.err"):
        errors = [line.strip() for line in log.read_text(errors="replace").splitlines() if _ERROR.match(line.strip())]
        return f"; its log ends with {errors[-1]!r}: {log}" if errors else f"; its log: {log}"
    return ""
