"""Engines of different shapes, some of several cores, are one generator: prompts are routed, versions are gathered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from refit_transport.cluster import engine_group
from refit_transport.cluster.engine_group import EngineGroup
from refit_transport.cluster.layout import ClusterLayout
from refit_transport.config.engine_shape import EngineShape
from refit_transport.rl.protocols import SamplingConfig

WIDE, SINGLE, CORES = EngineShape(tensor=2), EngineShape(), EngineShape(expert=2)


class Core:
    """Stands in for an engine actor: its methods answer at once."""

    def __init__(self, version: int) -> None:
        self.generate = SimpleNamespace(remote=self._generate)
        self.weight_version = SimpleNamespace(remote=lambda: version)
        self.pids = SimpleNamespace(remote=lambda: [version])
        self.asked: list = []

    def _generate(self, prompts, sampling):
        self.asked.append((prompts, sampling.seed, sampling.max_new_tokens))
        return [f"answer to {prompt}" for prompt in prompts]


@pytest.fixture
def group(monkeypatch):
    """``group(*shapes, versions)``: engines of these shapes whose cores hold ``versions``."""
    monkeypatch.setattr(engine_group, "await_all", lambda calls, doing, timeout: [answer for _, answer in calls])

    def make(*shapes, versions):
        made = object.__new__(EngineGroup)
        made.layout, made._timeout = ClusterLayout(1, shapes), 1.0
        made.actors = [Core(version) for version in versions]
        made.names = [core.name for core in made.layout.cores]
        return made

    return make


def test_an_engine_answers_as_many_prompts_as_it_has_ranks_and_each_keeps_its_seed(group):
    engines = group(WIDE, SINGLE, versions=(3, 3))
    prompts = [[number] for number in range(6)]
    answers = engines.generate(prompts, SamplingConfig(4, seed=100))
    assert answers == [f"answer to [{number}]" for number in range(6)]
    assert engines.actors[0].asked == [(prompts[:4], 100, 4)]
    assert engines.actors[1].asked == [(prompts[4:], 104, 4)]


def test_every_core_of_a_working_engine_computes_and_what_fills_it_is_not_an_answer(group):
    engines = group(CORES, SINGLE, versions=(3, 3, 3))
    assert engines.generate([[7], [8]], SamplingConfig(4, seed=100)) == ["answer to [7]", "answer to [8]"]
    idle, working, single = (actor.asked for actor in engines.actors)
    assert [prompts for prompts, *_ in working + single] == [[[7]], [[8]]]
    assert idle == [([[7]], 100, 1)]  # a token that nobody reads


def test_an_engine_without_prompts_is_left_alone(group):
    engines = group(CORES, SINGLE, versions=(3, 3, 3))
    assert engines.generate([[7]], SamplingConfig(4)) == ["answer to [7]"]
    assert [len(actor.asked) for actor in engines.actors] == [0, 0, 1]
    assert engines.generate([], SamplingConfig(4)) == []


def test_an_engine_whose_cores_hold_different_versions_holds_none(group):
    assert group(CORES, SINGLE, versions=(3, 3, 3)).weight_versions() == [3, 3]
    assert group(CORES, CORES, versions=(3, 4, 3, 3)).weight_versions() == [-1, 3]


def test_workers_of_an_engine_are_those_of_its_cores_in_order(group):
    engines = group(CORES, SINGLE, versions=(10, 11, 12))
    assert (engines.worker_pids(0), engines.worker_pids(1)) == ([10, 11], [12])
