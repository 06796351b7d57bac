"""Refits the draft model of speculative decoding with the model that it drafts for: one refit, one commit, one version.

A multi-token-prediction head reads the checkpoint of its target. A draft with a checkpoint of its own (EAGLE, Medusa,
a small model) reads the trainers' tensors whose names begin with ``draft.``. Modules that vLLM shares between the two,
such as the embedding and the output head, are written as the target's only. What no trainer tensor writes keeps its
values, and is reported as left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from refit_transport.engines.base import SinkDescription
from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region

from .model_format import tensors_of
from .recorder import Recording, record
from .sink import DRAFT, VllmSink
from .write_mode import WriteMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def worker_sink(worker: Any, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> VllmSink | DraftedSink:
    """The sink of a worker's ``model``, and of its draft model where it has one. ``worker`` may be None."""
    target = VllmSink(model, vllm_config, device)
    draft = None if worker is None else worker.get_draft_model()
    if draft is None or not any(True for _ in draft.parameters()):
        return target
    return DraftedSink(target, DraftSink(draft, model, vllm_config, device))


class DraftSink(VllmSink):
    """The draft model of one worker."""

    def __init__(self, draft: nn.Module, target: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        drafts, targets = vllm_config.speculative_config.draft_model_config, vllm_config.model_config
        super().__init__(draft, vllm_config, device, drafts.dtype)
        self._reads_target = drafts.model == targets.model
        self._of_target = {id(tensor) for module in target.modules() for tensor in tensors_of(module).values()}
        self.left_out: tuple[str, ...] = ()
        """Paths of tensors that no checkpoint tensor writes."""

    def describe(self, parameters: Sequence[LogicalParameter], direct: frozenset[str]) -> SinkDescription:
        """See ``VllmSink``. Raises ValueError that names what is missing of a module that is processed as a whole."""
        found = super().describe(parameters, direct)
        torn = [path for path in self.left_out if self._modes.get(path.rpartition(".")[0]) is WriteMode.STAGED]
        if torn:
            raise ValueError(
                f"the trainers send {type(self._model).__name__}, the engine's draft model, in part: "
                f"{', '.join(torn)} would keep old values beside new ones in one module; send all of it or none"
            )
        return found

    def _reads(self, name: str) -> bool:
        return name.startswith(DRAFT) or self._reads_target

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with disable_mtp_completeness_check():
            self._model.load_weights((name.removeprefix(DRAFT), tensor) for name, tensor in weights)

    def _record(self, parameters: Sequence[LogicalParameter]) -> Recording:
        """What the loaders write into tensors of the draft alone."""
        recording = record(self._model, parameters, self._load if parameters else _load_nothing)
        own = {path for path in recording.formats if id(self._live(path)) not in self._of_target}
        recording.formats = {path: form for path, form in recording.formats.items() if path in own}
        recording.copies = [copy for copy in recording.copies if copy.tensor in own]
        recording.zeros = [zero for zero in recording.zeros if zero.tensor in own]
        recording.computed = [item for item in recording.computed if item.tensor is None or item.tensor in own]
        return recording

    def _required(self, recording: Recording) -> dict[str, int]:
        """Tensors that are written at all must be written in full."""
        written = {item.tensor for item in (*recording.copies, *recording.computed)}
        required = super()._required(recording)
        self.left_out = tuple(sorted(required.keys() - written))
        return {path: count for path, count in required.items() if path in written}

    def _live(self, path: str) -> torch.Tensor | None:
        owner, _, name = path.rpartition(".")
        return tensors_of(self._modules[owner]).get(name)


class DraftedSink:
    """A target model and its draft as one ``WeightSink``."""

    def __init__(self, target: VllmSink, draft: DraftSink) -> None:
        self._draft, self._sinks = draft, (target, draft)
        self._needed: tuple[frozenset[str], ...] = (frozenset(), frozenset())
        self._direct: dict[str, VllmSink] = {}
        self.reasons: dict[str, str] = {}
        """As ``VllmSink.reasons``."""
        self.transient: frozenset[str] = frozenset()

    def describe(self, parameters: Sequence[LogicalParameter], direct: frozenset[str]) -> SinkDescription:
        """See ``WeightSink``. A name that both models need arrives whole, once."""
        found = [sink.describe(parameters, direct) for sink in self._sinks]
        both = _needed(found[0]) & _needed(found[1])
        if split := both & (found[0].direct.keys() | found[1].direct.keys()):
            found = [sink.describe(parameters, direct - both) for sink in self._sinks]
        self._needed = tuple(map(_needed, found))
        self._direct = {name: sink for sink, part in zip(self._sinks, found, strict=True) for name in part.direct}
        self.reasons = {name: why for part in found for name, why in part.reasons.items()}
        self.reasons.update(dict.fromkeys(split, "the engine's model and its draft model both need it"))
        self.transient = frozenset().union(*(sink.transient for sink in self._sinks))
        dtypes: dict[str, str] = {}
        for name, dtype in (item for part in found for item in part.dtypes.items()):
            dtypes[name] = _wider(dtypes.get(name, dtype), dtype)
        return SinkDescription(
            direct={name: regions for part in found for name, regions in part.direct.items()},
            whole=found[0].whole | found[1].whole,
            ignored=found[0].ignored & found[1].ignored,
            dtypes=dtypes,
            reasons=self.reasons,
            left_out=frozenset(DRAFT + path for path in self._draft.left_out),
        )

    def modes(self) -> dict[str, str]:
        """As ``VllmSink.modes``; paths in the draft model begin with ``draft.``."""
        target, draft = (sink.modes() for sink in self._sinks)
        return {**target, **{DRAFT + path: mode for path, mode in draft.items()}}

    @property
    def staged_bytes(self) -> int:
        """As ``VllmSink.staged_bytes``."""
        return sum(sink.staged_bytes for sink in self._sinks)

    def begin(self, version: int) -> bool:
        """See ``WeightSink``."""
        return any([sink.begin(version) for sink in self._sinks])

    def view(self, name: str, region: Region) -> torch.Tensor:
        """See ``WeightSink``."""
        return self._direct[name].view(name, region)

    def arrived(self, direct: Sequence[str], whole: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``WeightSink``."""
        for sink, needed in zip(self._sinks, self._needed, strict=True):
            sink.arrived([name for name in direct if name in needed], [item for item in whole if item[0] in needed])

    def commit(self, version: int) -> None:
        """See ``WeightSink``."""
        for sink in self._sinks:
            sink.commit(version)

    def abort(self) -> None:
        """See ``WeightSink``."""
        for sink in self._sinks:
            sink.abort()


def _needed(found: SinkDescription) -> frozenset[str]:
    return found.whole.union(found.direct)


def _wider(one: str, other: str) -> str:
    return str(torch.promote_types(getattr(torch, one), getattr(torch, other))).removeprefix("torch.")


def _load_nothing(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Some loaders refuse an empty checkpoint."""
