"""Runs a function on forked gloo ranks and hands back what each returned."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.conversion_mapping
import transformers.modeling_utils  # noqa: F401  # all of it here, so that no forked rank pays for an import

torch.set_num_threads(1)
DEADLINE_S = 120.0


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, group: bool = True) -> list[Any]:
    """``function(rank, *args)`` in ``world_size`` forked processes, which share a gloo group if ``group``. Returns the
    results by rank (anything that pickles). Raises AssertionError with the traceback of the ranks that failed."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        body = (function, args, f"file://{directory}/store" if group else None)
        ranks = [
            context.Process(target=_run_rank, args=(rank, world_size, pipes[rank][1], *body), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, [receive for receive, _ in pipes])
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(ranks: list[Any], pipes: list[Any]) -> list[Any]:
    deadline = time.monotonic() + DEADLINE_S
    results, failures = {}, []
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready = connection.wait([*waiting.values(), *(ranks[r].sentinel for r in waiting)], 1.0 if failures else 5.0)
        for rank, pipe in list(waiting.items()):
            if pipe.poll():
                ok, payload = pickle.loads(pipe.recv_bytes())
                results |= {rank: payload} if ok else {}
                failures += [] if ok else [payload]
            elif ranks[rank].sentinel in ready:
                ranks[rank].join()
                failures.append(f"rank {rank}: died with exit code {ranks[rank].exitcode}")
            else:
                continue
            del waiting[rank]
        if failures and not ready:
            break  # the others wait for a rank that failed
    failures += [f"rank {rank}: no answer" for rank in waiting]
    assert not failures, "\n".join(failures)
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    rank: int, world_size: int, pipe: Any, function: Callable[..., Any], args: tuple, init_method: str | None
) -> None:
    # A forked process makes torch's thread pool anew at the first use. Threads that are first together find none.
    torch.set_num_threads(1)
    signal.alarm(int(2 * DEADLINE_S))  # no orphan outlives a parent that was killed
    try:
        if init_method:
            timeout = timedelta(seconds=DEADLINE_S)
            dist.init_process_group("gloo", init_method, world_size=world_size, rank=rank, timeout=timeout)
        answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, f"rank {rank}: {traceback.format_exc()}")
    pipe.send_bytes(pickle.dumps(answer))
    # The parent kills all ranks at once: one that left earlier would break the others' last collective, and several
    # gloo groups abort now and then in the interpreter's exit.
    signal.pause()
