"""The recorder sees where a loader puts what, refuses to guess at computed values, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from refit_transport.layout.layout import LogicalParameter
from refit_transport.layout.region import Region

pytestmark = pytest.mark.engine


class Layer(nn.Module):
    """A fused projection, its bias, a norm, a cache that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.arange(48.0).view(8, 6), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(3), persistent=False)


class Model(nn.Module):
    """Loads with ``how``, a function of (model, name, tensor)."""

    def __init__(self, how) -> None:
        super().__init__()
        self.layer = Layer()
        self.how = how

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.how(self.layer, name, tensor)


def copy_up_and_gate(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    target = {"gate": layer.fused.data[:4], "up": layer.fused.data[4:], "norm": layer.norm.data, "scale": layer.scale}
    target[name].copy_(tensor)


CHECKPOINT = {"gate": (4, 6), "norm": (6,), "scale": (2,), "up": (4, 6)}


def parameters(checkpoint: dict[str, tuple[int, ...]]) -> list[LogicalParameter]:
    return [LogicalParameter(name, shape, "float32") for name, shape in checkpoint.items()]


def recorded(how, checkpoint=CHECKPOINT):
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from refit_transport.engines.vllm.recorder import record

    model = Model(how)
    record_metadata_for_reloading(model)
    return model, record(model, parameters(checkpoint))


def decided(how, checkpoint=CHECKPOINT, direct=None, required=None):
    from refit_transport.engines.vllm.destinations import destinations

    _, recording = recorded(how, checkpoint)
    needed = {"layer.fused": 48, "layer.norm": 6, "layer.scale": 2} if required is None else required
    return destinations(recording, parameters(checkpoint), frozenset(checkpoint if direct is None else direct), needed)


def test_recording_runs_without_data_and_restores_every_object():
    model, _ = recorded(copy_up_and_gate)
    assert torch.equal(model.layer.fused, torch.arange(48.0).view(8, 6))
    assert list(model.state_dict()) == ["layer.fused", "layer.norm", "layer.scale"]
    assert list(dict(model.named_buffers())) == ["layer.scale", "layer.cache"]


def test_plain_copies_become_direct_regions():
    found = decided(copy_up_and_gate)
    path, landing = found.direct["up"][0]
    assert (path, landing.region, landing.offset) == ("layer.fused", Region((0, 0), (4, 6)), 24)
    assert found.description().whole == frozenset()
    assert set(found.description().direct) == set(CHECKPOINT)


def test_names_outside_the_scope_arrive_whole_without_a_reason():
    found = decided(copy_up_and_gate, direct=["gate", "up"])
    assert found.description().whole == {"norm", "scale"}
    assert found.reasons == {}


def computing(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    if name == "norm":
        layer.norm.data.copy_(-torch.exp(tensor.float()))
    else:
        copy_up_and_gate(layer, name, tensor)


def composed(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    copy_up_and_gate(layer, name, tensor)
    if name == "norm":
        layer.norm.data.copy_(-torch.exp(layer.norm.data))


def in_place(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    copy_up_and_gate(layer, name, tensor)
    if name == "norm":
        layer.norm.data.add_(1)


def changed_source(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    copy_up_and_gate(layer, name, tensor.mul_(2) if name == "norm" else tensor)


@pytest.mark.parametrize("how", [computing, composed, in_place, changed_source])
def test_a_computed_tensor_goes_through_the_loader_with_the_reason(how):
    found = decided(how)
    assert found.loads == {"norm": ("layer.norm",)}
    assert "aten." in found.reasons["norm"]
    assert set(found.direct) == {"gate", "up", "scale"}


def zeroed(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    """What gpt-oss does to a bias that only the first rank adds."""
    copy_up_and_gate(layer, name, tensor.zero_() if name == "norm" else tensor)


def test_a_zeroed_source_needs_no_bytes():
    found = decided(zeroed)
    assert found.ignored == {"norm"}
    assert [zero.tensor for zero in found.zeros] == ["layer.norm"]


def every_second_column(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    copy_up_and_gate(layer, name, tensor[:, ::2] if name == "gate" else tensor)


def test_a_part_that_falls_into_boxes_is_direct_box_by_box():
    found = decided(every_second_column, {**CHECKPOINT, "gate": (4, 12)})
    assert len(found.direct["gate"]) == 6
    assert found.direct["gate"][1][1].region == Region((0, 2), (4, 3))


def twice(layer: Layer, name: str, tensor: torch.Tensor) -> None:
    if name == "gate":
        layer.fused.data[4:].copy_(tensor)
    copy_up_and_gate(layer, name, tensor)


def test_elements_that_land_in_two_places_arrive_whole():
    found = decided(twice, {"gate": (4, 6), "norm": (6,), "scale": (2,)})
    assert "several places" in found.reasons["gate"]
    assert len(found.replays["gate"]) == 2


def test_a_tensor_that_nobody_writes_is_refused_by_name():
    with pytest.raises(ValueError, match=r"written by nobody: layer.fused \(24 of 48 elements\)"):
        decided(copy_up_and_gate, {n: s for n, s in CHECKPOINT.items() if n != "up"})


def test_a_tensor_that_two_names_write_is_refused_by_name():
    with pytest.raises(ValueError, match=r"written twice: layer.fused \(by .*gate.*\)"):
        decided(twice)


def test_a_foreign_tensor_is_ignored():
    def skip(layer: Layer, name: str, tensor: torch.Tensor) -> None:
        if name != "other":
            copy_up_and_gate(layer, name, tensor)

    assert decided(skip, {**CHECKPOINT, "other": (3,)}).ignored == {"other"}


def test_a_name_that_the_loader_rejects_is_named():
    with pytest.raises(ValueError, match=r"load_weights rejects .*'other'"):
        recorded(copy_up_and_gate, {"gate": (4, 6), "other": (3,)})


def test_a_missing_private_name_is_reported_with_both_versions(monkeypatch):
    from refit_transport.engines.vllm import private_names

    monkeypatch.setattr(private_names, "PRIVATE_NAMES", (("vllm.config", "no_such_name"), ("vllm.no_module", "x")))
    private_names.check_private_names.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"vLLM .* lacks vllm.config.no_such_name, vllm.no_module.*tested with"):
            private_names.check_private_names()
    finally:
        private_names.check_private_names.cache_clear()


@pytest.fixture
def sink_of():
    """``sink_of(direct)``: a model's sink that has described itself."""
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from refit_transport.engines.vllm.sink import VllmSink

    def make(direct: frozenset[str]) -> VllmSink:
        model = Model(copy_up_and_gate)
        record_metadata_for_reloading(model)
        sink = VllmSink(model, VllmConfig(), torch.device("cpu"), torch.float32)
        sink.describe(parameters(CHECKPOINT), direct)
        return sink

    return make


@pytest.mark.parametrize("direct, whole", [((), ("gate",)), (("norm",), ())])
def test_a_tensor_that_arrives_in_another_way_than_described_is_not_counted_as_written(direct, whole, sink_of) -> None:
    sink = sink_of(frozenset(("gate", "up")))
    sink.begin(1)
    with pytest.raises(RuntimeError, match=r"arrived (whole|directly), which is not how this rank described it"):
        sink.arrived(direct, [(name, torch.zeros(CHECKPOINT[name])) for name in whole])


def test_tensors_that_vllm_replaced_since_the_last_refit_are_found(sink_of) -> None:
    sink = sink_of(frozenset(CHECKPOINT))
    moved = [sink.begin(1)]
    sink.abort()
    moved.append(sink.begin(2))
    sink.abort()
    layer = sink._model.layer
    layer.fused.data = layer.fused.data.clone()
    moved.append(sink.begin(3))
    sink.abort()
    moved.append(sink.begin(4))
    assert moved == [False, False, True, False]
