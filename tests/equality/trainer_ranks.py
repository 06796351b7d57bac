"""FSDP2 ranks in processes of their own: each holds its shards of a live transformers model and trains the session."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.conversion_mapping",
    "transformers.models.auto.modeling_auto",
)
"""What no forked rank should pay for. Ranks are forked from a server that has these and no engine: a process with vLLM
in it already has the default process group that the ranks need for themselves."""
DEADLINE_S = 90.0
LIFE_S = 1200
DOMAIN = "trainers"


class TrainerRanks:
    """``world_size`` ranks that share a gloo group. ``begin`` starts a method of ``_Rank`` on all of them, ``end``
    returns what it returned, by rank."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self._store = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            args = (there, rank, world_size, f"file://{self._store.name}/store")
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def begin(self, method: str, *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((method, args))

    def end(self) -> list[Any]:
        """Raises AssertionError with the traceback of every rank that failed, or did not answer in time."""
        answers = [_answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        failures = [text for ok, text in answers if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def call(self, method: str, *args: Any) -> list[Any]:
        self.begin(method, *args)
        return self.end()

    def close(self) -> None:
        """All at once: a rank that left earlier would break the others' last collective."""
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()


def _answer(rank: int, pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(DEADLINE_S) else (False, f"trainer rank {rank}: no answer")
    except EOFError:
        return False, f"trainer rank {rank}: died"


def _serve(pipe: Any, rank: int, world_size: int, init_method: str) -> None:
    signal.alarm(LIFE_S)  # no orphan outlives a parent that was killed
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method, world_size=world_size, rank=rank)
    body = _Rank(rank)
    while True:
        method, args = pipe.recv()
        try:
            answer = (True, getattr(body, method)(*args))
        except Exception:
            answer = (False, f"trainer rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._model: Any = None
        self._shards: dict[str, dict[str, torch.Tensor]] = {}
        self._source: Any = None
        self._member: Any = None
        self._wire: Any = None

    def load(self, paths: Mapping[str, Path], dtype: str) -> None:
        """Shard the model of the first path, and keep this rank's shards of every path."""
        from refit_transport.trainers.dtensor import DTensorSource

        models = {which: _sharded(path, getattr(torch, dtype)) for which, path in paths.items()}
        self._shards = {which: {n: t.clone() for n, t in _local(model).items()} for which, model in models.items()}
        self._model = next(iter(models.values()))
        self._source = DTensorSource(self._model)

    def join(self, address: str) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
        """Join the session. Returns every arrival on the reshard path: name, joint rank, start and stop of the region
        that the rank stores."""
        from refit_transport.planning.plan import Route
        from refit_transport.session.member import RefitMember
        from refit_transport.wires.tcp import TcpWire

        self._wire = _Counting(TcpWire())
        self._member = RefitMember.join(
            address, rank=self.rank, role="trainer", source=self._source, wire=self._wire, domain=DOMAIN
        )
        plan = self._member.agreement.plan
        return [
            (plan.parameters[member].name, transfer.dst, transfer.region.start, transfer.region.stop)
            for group in plan.groups
            if group.route is Route.RESHARD
            for transfer in group.transfers
            if transfer.wanted
            for member in group.members
        ]

    def refit(self, which: str, version: int) -> tuple[dict[str, Any], dict[str, int]]:
        """Give the live model the weights of ``which``, run it, send it. Returns the report and what this rank sent."""
        self._model.reshard()
        with torch.no_grad():
            for name, tensor in _local(self._model).items():
                tensor.copy_(self._shards[which][name])
            self._model(input_ids=torch.arange(2, 10)[None])
        report = self._member.refit(version)
        return asdict(report), self._wire.sent

    def leave(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None


class _Counting:
    """A wire that remembers what it counted as sent."""

    def __init__(self, wire: Any) -> None:
        self._wire, self.sent = wire, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        stats = self._wire.run(*args, **kwargs)
        self.sent = dict(stats.sent)
        return stats


def _sharded(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    import transformers
    from torch.distributed.device_mesh import init_device_mesh

    from refit_transport.rl.policy.parallel import shard_layers

    (architecture,) = transformers.AutoConfig.from_pretrained(path).architectures
    model = getattr(transformers, architecture).from_pretrained(path, dtype=dtype)
    model.config.use_cache = False
    shard_layers(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), {})
    return model


def _local(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's memory of every parameter and persistent buffer."""
    state = model.state_dict()
    return {name: t.to_local() if hasattr(t, "to_local") else t for name, t in state.items()}
