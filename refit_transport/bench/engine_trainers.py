"""A trainer rank that refits an engine from a checkpoint on disk, without a model or a step."""

from __future__ import annotations

from pathlib import Path

from refit_transport.layout.region import Region
from refit_transport.layout.sharding import chunk
from refit_transport.session.member import RefitMember
from refit_transport.session.report import RefitReport
from refit_transport.trainers.tensors import TensorSource


class CheckpointTrainer:
    """Joint rank ``rank`` of a session, holding its chunk of the rows of a checkpoint."""

    def __init__(self, model: Path, ranks: int, timeout_seconds: float, rank: int) -> None:
        self._model, self._ranks, self._timeout, self._rank = model, ranks, timeout_seconds, rank
        self._member: RefitMember | None = None

    def join(self, address: str) -> None:
        source = rows_of(self._model, self._rank, self._ranks)
        self._member = RefitMember.join(address, rank=self._rank, role="trainer", source=source, timeout=self._timeout)

    def refit(self, version: int) -> RefitReport:
        return self._member.refit(version, timeout=self._timeout)

    def close(self) -> None:
        if self._member is not None:
            self._member.leave()


def rows_of(model: Path, rank: int, ranks: int) -> TensorSource:
    """``rank``'s chunk of the rows of every tensor, read from the checkpoint; scalars lie on rank 0."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    held = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                rows = opened.get_slice(name)
                shape = shapes[name] = tuple(rows.get_shape())
                start, stop = chunk(shape[0] if shape else 1, ranks, rank)
                if start < stop:
                    region = Region((start, *(0 for _ in shape[1:])), (stop, *shape[1:])) if shape else Region((), ())
                    held[name] = [(region, rows[start:stop] if shape else opened.get_tensor(name))]
    return TensorSource(shapes, held)
