"""Waiting for several actors together: the first failure ends the wait, and every wait has a deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from .errors import ClusterError

_ERROR = re.compile(r"(\S+ )?[A-Za-z_.]*(Error|Exception)\b.*: .+")


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
        raise ClusterError(f"{name} died while {doing}: {_first_line(error)}{_log_of(name)}") from error
    except RayTaskError as error:
        cause = error.cause if error.cause is not None else error
        text = f"{name} failed while {doing}: {type(cause).__name__}: {_first_line(cause)}"
        raise ClusterError(text + _log_of(name)) from error
    except GetTimeoutError as error:
        raise ClusterError(f"{name} answered while {doing}, but its result could not be fetched") from error


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
