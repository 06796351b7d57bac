"""Engines of two workers, over a real session: every refit equals the weights that the engine was started with."""

from __future__ import annotations

import os
from typing import Any

import pytest
from vllm_engines import make_pair, outputs_of, start_engine
from vllm_sessions import joined, status_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYOUTS = {
    "dense TP2": ("qwen3", {"tensor_parallel_size": 2}),
    "tied dense PP2": ("qwen3_tied", {"pipeline_parallel_size": 2}),
    "experts TP2": ("qwen3_moe", {"tensor_parallel_size": 2}),
    "uneven experts EP2": ("qwen3_moe_uneven", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "shared experts EP2": ("qwen3_next", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def engine(request, tmp_path):
    """Paths of A and B, and an engine of B with two workers."""
    family, options = request.param
    paths = make_pair(family, tmp_path)
    llm = start_engine(paths["b"], **options)
    yield llm, paths
    llm.llm_engine.engine_core.shutdown()


def test_refits_there_and_back_equal_the_engine_as_it_was_loaded(engine):
    llm, paths = engine
    fresh, before = outputs_of(llm), llm.collective_rpc("weight_fingerprint")
    server, _, trainer = joined(llm, paths["a"], workers=2)
    trainer.send_weights()
    between = llm.collective_rpc("weight_fingerprint")
    for was, now in zip(before, between, strict=True):
        unchanged = {path for path in was if was[path] == now[path] and not path.endswith("_expert_map")}
        assert not any("proj" in path or "experts" in path or "norm" in path for path in unchanged), unchanged
    assert outputs_of(llm) != fresh
    trainer.shutdown()
    llm.shutdown_weight_transfer_engine()
    server.close()
    server, _, trainer = joined(llm, paths["b"], workers=2)
    trainer.send_weights()
    assert llm.collective_rpc("weight_fingerprint") == before
    assert outputs_of(llm) == fresh
    assert [s["state"] for s in status_of(llm)] == ["fresh", "fresh"]
    assert [s["rank"] for s in status_of(llm)] == [1, 2]
    assert os.getpid() not in {s["pid"] for s in status_of(llm)}
    with pytest.raises(RuntimeError, match="the source is gone"):
        _send_torn(trainer)
    assert [s["state"] for s in status_of(llm)] == ["stale", "stale"]
    assert [s["rank"] for s in status_of(llm)] == [1, 2]
    with pytest.raises(Exception, match=r"[Ee]ngine"):
        outputs_of(llm)
    server.close()


def _send_torn(trainer: Any) -> None:
    def gone() -> bool:
        raise OSError("the source is gone")

    trainer.source.refresh = gone
    trainer.send_weights()
