"""The engine actor refuses to generate with stale weights before it asks vLLM, whose engine would not survive it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from refit_transport.cluster.engine_actor import EngineActor
from refit_transport.cluster.errors import ClusterError
from refit_transport.cluster.orphans import DIE_WITH_PARENT
from refit_transport.rl.protocols import SamplingConfig

STALE = "this engine (worker 1) is STALE and must not generate: the refit from version 3 to version 4 failed"
FRESH = {"state": "fresh", "version": 3, "refusal": None}
TORN = {"state": "stale", "version": 3, "refusal": STALE}
UNJOINED = {"state": "unjoined", "version": -1, "refusal": None}
SERVING = {"state": "stale", "version": -1, "refusal": None}
"""Joined with ``serve_initial_weights``."""


class Engine:
    """Stands in for vLLM's ``LLM``."""

    def __init__(self, statuses):
        self.statuses, self.prompts, self.bars = statuses, [], []

    def collective_rpc(self, method):
        assert method == "refit_status"
        return self.statuses

    def generate(self, prompts, params, use_tqdm):
        self.prompts += [prompt["prompt_token_ids"] for prompt in prompts]
        self.bars.append(use_tqdm)
        output = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-0.5)}], finish_reason="length")
        return [SimpleNamespace(outputs=[output]) for _ in prompts]


@pytest.fixture
def actor(monkeypatch):
    """``actor(statuses)``: an actor around a stand-in whose workers report ``statuses``."""
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)

    def make(statuses):
        made = EngineActor(2, "engine 2")
        made._llm = Engine(statuses)
        return made

    return make


def test_one_stale_worker_is_enough_to_refuse_and_vllm_is_not_asked(actor):
    stale = actor([FRESH, TORN])
    with pytest.raises(ClusterError, match=r"engine 2 cannot generate: .*worker 1.*version 3 to version 4 failed"):
        stale.generate([[1, 2]], SamplingConfig(max_new_tokens=1))
    assert stale._llm.prompts == []
    stale._llm.statuses = [FRESH, FRESH]
    (completion,) = stale.generate([[1, 2]], SamplingConfig(max_new_tokens=1))
    assert (completion.token_ids, completion.logprobs, completion.weight_versions) == ([5], [-0.5], (3,))


@pytest.mark.parametrize("status", [UNJOINED, SERVING])
def test_weights_that_may_be_served_are_generated_with_under_no_version(status, actor):
    (completion,) = actor([status]).generate([[1, 2]], SamplingConfig(max_new_tokens=1))
    assert completion.weight_versions == (-1,)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_engines_own_progress_bar_is_shown_as_configured(wanted, actor, monkeypatch):
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", DIE_WITH_PARENT):
        monkeypatch.setenv(name, "0")
    started = actor([FRESH])
    sys.modules["vllm"].LLM = lambda **_: Engine([FRESH])
    started.start({}, False, {}, wanted)
    started.generate([[1]], SamplingConfig(max_new_tokens=1))
    assert started._llm.bars == [wanted]
