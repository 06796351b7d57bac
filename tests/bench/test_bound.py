"""The network minimum and the bound: exact for the reference cases."""

from pathlib import Path

import pytest

from refit_transport.bench.bound import network_minimum
from refit_transport.bench.config import Cluster, load
from refit_transport.bench.workload import tensors_of

CASE = """
cluster: {{nic: {nic}, rate: 8mbit, domains: {domains}}}
trainers: {{mesh: {{fsdp: 4}}, ranks: [0, 1, 2, 3]}}
engines: {{mesh: {{dp: 2, tp: 2}}, ranks: {engines}}}
tensors: [{{name: w, shape: [8, 8], dtype: float32, trainers: {{fsdp: 0}}, engines: {{tp: 1}}}}]
"""
MODEL = 8 * 8 * 4


def case(folder: Path, domains, engines=(4, 5, 6, 7), nic="rank"):
    path = folder / "case.yaml"
    path.write_text(CASE.format(nic=nic, domains=[list(d) for d in domains], engines=list(engines)))
    return load(path)


@pytest.mark.parametrize(
    ("domains", "engines", "incoming", "outgoing"),
    [
        ([(0, 1, 2, 3), (4, 5, 6, 7)], (4, 5, 6, 7), (0, MODEL), (MODEL, 0)),
        ([(0, 1, 2, 3), (4, 5), (6, 7)], (4, 5, 6, 7), (0, MODEL, MODEL), (MODEL, 0, 0)),
        ([(0, 1, 2, 3, 4, 5, 6, 7)], (4, 5, 6, 7), (0,), (0,)),
        # Two nodes that hold half of the rows each and a replica each: the other half must enter both.
        ([(0, 1, 4, 5), (2, 3, 6, 7)], (4, 5, 6, 7), (MODEL // 2, MODEL // 2), (MODEL // 2, MODEL // 2)),
        # One engine rank per node: only its own columns enter.
        ([(0, 1, 2, 3), (4, 6), (5, 7)], (4, 5, 6, 7), (0, MODEL // 2, MODEL // 2), (MODEL, 0, 0)),
    ],
)
def test_each_domain_needs_exactly_what_it_does_not_hold(tmp_path, domains, engines, incoming, outgoing):
    config = case(tmp_path, domains, engines)
    minimum = network_minimum(tensors_of(config), config.cluster.domains)
    assert (minimum.incoming, minimum.outgoing) == (incoming, outgoing)


@pytest.mark.parametrize(("nic", "cards"), [("rank", 4), ("node", 1)])
def test_the_bound_is_the_busiest_domains_bytes_at_the_rate_of_its_cards(tmp_path, nic, cards):
    config = case(tmp_path, [(0, 1, 2, 3), (4, 5, 6, 7)], nic=nic)
    minimum = network_minimum(tensors_of(config), config.cluster.domains)
    assert minimum.seconds(config.cluster) == pytest.approx(MODEL / 1e6 / cards)


def test_a_node_with_fewer_cards_sets_the_bound(tmp_path):
    config = case(tmp_path, [(0, 1, 2, 3), (4, 5), (6, 7)])
    minimum = network_minimum(tensors_of(config), config.cluster.domains)
    assert minimum.seconds(Cluster(config.cluster.domains, "rank", "8mbit")) == pytest.approx(MODEL / 1e6 / 2)
