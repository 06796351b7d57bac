"""Writes a refit into a live vLLM model: straight into what the kernels read where that is exact, else staged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from refit_transport.engines.base import SinkDescription
from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region

from . import cpu_fixups
from .destinations import NOT_WEIGHTS, Destinations, destinations
from .model_format import StagedModule, tensors_of
from .recorder import Recording, record
from .write_mode import WriteMode, write_mode

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFT = "draft."
"""Before names of a draft model's own checkpoint, and before paths in a draft model."""


class VllmSink:
    """One vLLM worker's model as a ``WeightSink``.

    Staged modules take memory from their first byte to their last. The stream arrives in the order of the layers, so
    only the modules of a few layers are staged at any time.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """``dtype`` is the model's, that of ``vllm_config`` if not given."""
        self._model, self._config, self._device = model, vllm_config, device
        self._dtype = dtype or vllm_config.model_config.dtype
        self._modules = dict(model.named_modules())
        self._destinations = Destinations()
        self.transient: frozenset[str] = frozenset()
        self._names_of: dict[str, frozenset[str]] = {}
        """Checkpoint tensors that each module waits for."""
        self._modules_of: dict[str, tuple[str, ...]] = {}
        self._modes: dict[str, WriteMode] = {}
        self._addresses: dict[str, int] = {}
        """Of the tensors that are written in place, by path: where they lay when the last refit began."""
        self._waiting: dict[str, set[str]] = {}
        self._staged: dict[str, StagedModule] = {}

    def describe(self, parameters: Sequence[LogicalParameter], direct: frozenset[str]) -> SinkDescription:
        """See ``WeightSink``. Runs the model's loaders without data; the engine must not compute meanwhile."""
        with self._in_vllm():
            recording = self._record([p for p in parameters if self._reads(p.name)])
        found = destinations(recording, parameters, direct, self._required(recording))
        names: dict[str, set[str]] = defaultdict(set)
        self._modules_of = {}
        for name in (*found.direct, *found.replays, *found.loads):
            modules = {path.rpartition(".")[0] for path in found.paths(name)}
            self._modules_of[name] = tuple(sorted(modules))
            for module in modules:
                names[module].add(name)
        owners = {*names, *(zero.tensor.rpartition(".")[0] for zero in found.zeros)}
        self._modes = {path: write_mode(path, self._modules[path], self._device) for path in sorted(owners)}
        self._names_of = {path: frozenset(needed) for path, needed in names.items()}
        self._destinations = found
        written = {path for landings in found.direct.values() for path, _ in landings}
        live = {path for path in written if self._modes[path.rpartition(".")[0]] is WriteMode.LIVE}
        self.transient = frozenset(
            name for name, landings in found.direct.items() if any(path not in live for path, _ in landings)
        )
        self._addresses = {path: self._address(path) for path in live}
        return found.description()

    @property
    def reasons(self) -> dict[str, str]:
        """Why a tensor goes whole although it was asked to go directly."""
        return self._destinations.reasons

    def modes(self) -> dict[str, str]:
        """Module path to ``live`` or ``staged``."""
        return {path: str(mode) for path, mode in self._modes.items()}

    @property
    def staged_bytes(self) -> int:
        """Bytes of the modules that are staged right now."""
        return sum(t.nbytes for staged in self._staged.values() for t in staged.staging.values())

    def begin(self, version: int) -> bool:
        """See ``WeightSink``. Raises RuntimeError when the refit before was neither committed nor aborted."""
        if self._waiting or self._staged:
            raise RuntimeError(f"refit {version} began before the one before it was committed or aborted")
        self._waiting = {path: set(names) for path, names in self._names_of.items()}
        for zero in self._destinations.zeros:
            module, _, _ = zero.tensor.rpartition(".")
            if self._modes[module] is WriteMode.LIVE:
                zero.target.on(self._tensor(zero.tensor)).zero_()
        before, self._addresses = self._addresses, {path: self._address(path) for path in self._addresses}
        return self._addresses != before

    def _address(self, path: str) -> int:
        return self._tensor(path).data_ptr()

    def view(self, name: str, region: Region) -> torch.Tensor:
        """See ``WeightSink``. Raises KeyError for a name that is not direct, ValueError for a region not its own."""
        for path, landing in self._destinations.direct[name]:
            if landing.region.contains(region):
                return landing.on(self._tensor(path), region)
        raise ValueError(f"{name}{region} is not inside a region that this rank writes directly")

    @torch.no_grad()
    def arrived(self, direct: Sequence[str], whole: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See ``WeightSink``. Raises RuntimeError for a tensor that comes whole and was described as direct, or the
        other way round: nothing would write it."""
        self._check_ways(direct, [name for name, _ in whole])
        computed = [(name, tensor.clone()) for name, tensor in whole if name in self._destinations.loads]
        for name, tensor in whole:
            for copy in self._destinations.replays.get(name, ()):
                copy.target.on(self._tensor(copy.tensor)).copy_(copy.source.on(tensor))
        with self._in_vllm():
            if computed:
                for name, _ in computed:
                    for path in self._destinations.loads[name]:
                        self._tensor(path)
                self._load(computed)
            for name in (*direct, *(name for name, _ in whole)):
                self._arrive(name)

    def commit(self, version: int) -> None:
        """See ``WeightSink``. Raises RuntimeError that names what never arrived."""
        if missing := sorted({name for names in self._waiting.values() for name in names}):
            raise RuntimeError(
                f"refit {version} is incomplete on this rank: {', '.join(missing[:8])} ({len(missing)} in all)"
            )
        with self._in_vllm(), torch.no_grad():
            if self._device.type == "cpu":
                cpu_fixups.refresh_embeddings(self._model)
                cpu_fixups.refresh_conv_weights(self._model)
            for module in self._modules.values():
                if is_deferred_attention_layer(module):
                    module.process_weights_after_loading(self._dtype)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        """See ``WeightSink``. The weights are a mixture of two versions then, but every kernel has its tensors."""
        for staged in self._staged.values():
            staged.discard()
        self._staged.clear()
        self._waiting.clear()

    def _reads(self, name: str) -> bool:
        """Whether the checkpoint tensor ``name`` may be for this model."""
        return not name.startswith(DRAFT)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(iter(weights))

    def _record(self, parameters: Sequence[LogicalParameter]) -> Recording:
        return record(self._model, parameters, self._load)

    def _required(self, recording: Recording) -> dict[str, int]:
        """Elements that a refit must write, per tensor that the engine has."""
        required = {}
        for path, (size, _) in recording.formats.items():
            owner, _, name = path.rpartition(".")
            module = self._modules[owner]
            tensor = tensors_of(module).get(name)
            if tensor is not None and name not in module._non_persistent_buffers_set and not NOT_WEIGHTS.search(path):
                required[path] = getattr(tensor, "weight_loader_numel", torch.Size(size).numel())
        return required

    def _tensor(self, path: str) -> torch.Tensor:
        """The tensor at ``path`` in model format, to write into; stages its module when needed."""
        owner, _, name = path.rpartition(".")
        if self._modes[owner] is WriteMode.LIVE:
            return tensors_of(self._modules[owner])[name].data
        if owner not in self._staged:
            self._staged[owner] = self._stage(owner)
        return self._staged[owner].staging[name].data

    def _stage(self, owner: str) -> StagedModule:
        prefix = f"{owner}."
        paths = {path for name in self._names_of[owner] for path in self._destinations.paths(name)}
        zeroed = {zero.tensor for zero in self._destinations.zeros}
        names = {path.removeprefix(prefix) for path in paths | zeroed if path.rpartition(".")[0] == owner}
        incomplete = {name for name in names if prefix + name in self._destinations.padded | zeroed}
        return StagedModule.open(owner, self._modules[owner], sorted(names), sorted(incomplete), self._device)

    def _check_ways(self, direct: Sequence[str], whole: Sequence[str]) -> None:
        for names, way, expected in ((direct, "directly", True), (whole, "whole", False)):
            if wrong := [name for name in names if (name in self._destinations.direct) != expected]:
                raise RuntimeError(f"{', '.join(wrong)} arrived {way}, which is not how this rank described it")

    def _arrive(self, name: str) -> None:
        for path in self._modules_of[name]:
            waiting = self._waiting.get(path)
            if waiting is None or name not in waiting:
                raise RuntimeError(f"{name} arrived twice, or outside a refit")
            waiting.discard(name)
            if not waiting:
                del self._waiting[path]
                if (staged := self._staged.pop(path, None)) is not None:
                    staged.close(self._process)

    def _process(self, module: nn.Module) -> None:
        """From model format to kernel format, as after the first load."""
        method = getattr(module, "quant_method", None)
        if not isinstance(method, QuantizeMethodBase):
            return
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        method.process_weights_after_loading(module)
        if self._device.type == "cpu":
            cpu_fixups.repack_experts(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()

    @contextmanager
    def _in_vllm(self) -> Iterator[None]:
        with set_current_vllm_config(self._config):
            yield
