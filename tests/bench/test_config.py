"""A benchmark configuration is read, inherited, overridden, and refused with every violation at once."""

from pathlib import Path

import pytest

from refit_transport.bench.bound import network_minimum, received_bytes
from refit_transport.bench.config import BenchConfigError, load
from refit_transport.bench.workload import tensors_of

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "bench").glob("*.yaml"))
MINIMAL = """
cluster: {nic: rank, rate: 1gbit, domains: [[0, 1], [2, 3]]}
trainers: {mesh: {fsdp: 2}}
engines: {mesh: {tp: 2}}
tensors:
  - {name: "layers.{layer}.w", repeat: {layer: 4}, shape: [8, 6], trainers: {fsdp: 0}, engines: {tp: 1}}
"""


def write(folder: Path, text: str, name: str = "case.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid_and_every_engine_byte_has_a_holder(path):
    config = load(path)
    tensors = tensors_of(config)
    model = sum(tensor.wire_nbytes for tensor in tensors)
    minimum = network_minimum(tensors, config.cluster.domains)
    assert received_bytes(tensors) >= model
    assert minimum.total % model == 0, "whole copies of the model enter the domains of engines"


def test_overrides_and_the_file_under_defaults_are_applied_in_this_order(tmp_path):
    write(tmp_path, MINIMAL, "base.yaml")
    path = write(tmp_path, "defaults: base.yaml\nrounds: 7\nbucket_bytes: 4096\n")
    config = load(path, ["rounds=9"])
    assert (config.rounds, config.bucket_bytes, config.world) == (9, 4096, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("rate: 1gbit", "rate: fast"), "cluster.rate: got 'fast'"),
        (("nic: rank", "nic: port"), "cluster.nic: got 'port', allowed: rank, node"),
        (("cluster: {", "wire: nccl\ncluster: {"), "wire: got 'nccl', allowed: tcp, gloo"),
        (("[2, 3]]", "[2]]"), "each of [0, 1, 2, 3] exactly once"),
        (("trainers: {fsdp: 0}", "trainers: {tp: 0}"), "tensors[layers.{layer}.w].trainers.tp: got axis 'tp'"),
        (("engines: {tp: 1}", "engines: {tp: 2}"), "got dimension 2, allowed: 0 to 1"),
        (("engines: {tp: 1}", "engines: {tp: expert}"), "got 'expert', allowed: a dimension, or one of ['layer']"),
        (("layer: 4", "layer: 3"), None),
        (("shape:", "shpae:"), "tensors[0].shpae: unknown key, nearest known: shape"),
    ],
)
def test_a_violation_is_named_with_key_value_and_what_is_allowed(tmp_path, change, told):
    path = write(tmp_path, MINIMAL.replace(*change))
    if told is None:
        assert len(tensors_of(load(path))) == 3
        return
    with pytest.raises(BenchConfigError) as failure:
        load(path)
    assert told in str(failure.value)


def test_all_violations_are_reported_at_once(tmp_path):
    path = write(tmp_path, MINIMAL.replace("nic: rank", "nic: port").replace("1gbit", "fast"))
    with pytest.raises(BenchConfigError) as failure:
        load(path, ["scope=half", "transports=[pigeon]", "rounds=0"])
    assert len(str(failure.value).splitlines()) == 5


def test_an_axis_over_a_repeat_index_gives_each_rank_whole_tensors(tmp_path):
    path = write(tmp_path, MINIMAL.replace("trainers: {fsdp: 0}", "trainers: {fsdp: layer}"))
    holders = [tensor.trainers.mesh.ranks for tensor in tensors_of(load(path))]
    assert holders == [(0,), (0,), (1,), (1,)]
