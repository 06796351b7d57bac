"""However a Megatron model is cut, its source covers the checkpoint and its worker computes what one process does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refit_transport.layout import Cell, Layout, Region, Shard
from tests.megatron.cases import CASES
from tests.megatron.steps import megatron_step, transformers_step
from tests.models import read_checkpoint
from tests.planning.sides import on_mesh, planned
from tests.trainers.forked_ranks import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")

_expected = {}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def checkpoint(case, tmp_path_factory):
    return case.checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(case, checkpoint):
    return run_ranks(case.ranks, megatron_step, case, checkpoint)


@pytest.fixture(scope="module")
def expected(case, checkpoint):
    key = (case.family, str(case.model))
    if key not in _expected:
        _expected[key] = transformers_step(checkpoint)
    return _expected[key]


def test_the_ranks_together_hold_every_element_of_the_checkpoint_and_nothing_else(ranks, checkpoint):
    tensors = read_checkpoint(checkpoint)
    missing = {name: np.ones(tensor.shape, bool) for name, tensor in tensors.items()}
    for rank in ranks:
        for name, shape, region, value in rank.loaded:
            assert shape == tuple(tensors[name].shape), name
            assert torch.equal(value, tensors[name][region.slices()].to(value.dtype)), (name, region)
            missing[name][region.slices()] = False
    assert not [name for name, left in missing.items() if left.any()]


def test_a_plan_to_tensor_parallel_engines_moves_every_element_right(case, ranks, checkpoint):
    source, sink = {}, {}
    engines = range(case.ranks, case.ranks + 2)
    for name, tensor in read_checkpoint(checkpoint).items():
        cells: dict[Region, list[int]] = {}
        for rank, result in enumerate(ranks):
            for region in result.holdings.get(name, ()):
                cells.setdefault(region, []).append(rank)
        shape = tuple(tensor.shape)
        source[name] = Layout(shape, tuple(Cell(region, tuple(held)) for region, held in sorted(cells.items())))
        sink[name] = on_mesh(shape, engines, [Shard(len(shape) - 1)])
    planned(source, sink, [range(case.ranks), engines], dtypes=("float32", "float32"))


def test_log_probabilities_are_those_of_the_transformers_model(ranks, expected):
    got = torch.cat([rank.logprobs for rank in ranks if rank.speaks])
    torch.testing.assert_close(got, expected.logprobs, atol=1e-5, rtol=0)


def test_an_optimizer_step_is_that_of_the_transformers_model(case, ranks, expected):
    if case.inexact_step:
        pytest.skip(case.inexact_step)
    for rank in ranks:
        assert rank.metrics == ranks[0].metrics
        assert rank.metrics["loss"] == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
        assert rank.metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
        for name, _, region, value in rank.stepped:
            message = f"{name} {region}"
            torch.testing.assert_close(
                value,
                expected.stepped[name][region.slices()],
                atol=2e-6,
                rtol=1e-5,
                msg=lambda m, at=message: f"{at}: {m}",
            )
    before = {(name, region): value for name, _, region, value in ranks[0].loaded}
    assert any((value - before[name, region]).abs().max() > 1e-3 for name, _, region, value in ranks[0].stepped)
