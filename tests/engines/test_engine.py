"""The weight-transfer engine: registered, refitted over a real session, and silent when its weights are torn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_engines import fingerprint_of, outputs_of, start_engine, worker_of
from vllm_sessions import joined, status_of

from tests.models import make_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return {which: make_model("qwen3", folder / which, seed) for seed, which in enumerate("ab")}


@pytest.fixture(scope="module")
def engine(checkpoints):
    """An engine of A with a prefix cache, and what fresh engines of A and B put out."""
    engines = {which: start_engine(path, enable_prefix_caching=True) for which, path in checkpoints.items()}
    fresh = {which: outputs_of(llm) for which, llm in engines.items()}
    return SimpleNamespace(llm=engines["a"], fresh=fresh, fingerprint=fingerprint_of(engines["b"]), others=engines)


def compute(llm: Any) -> None:
    """One step of requests. Through ``generate`` it would leave them in the scheduler of this process."""
    worker_of(llm).execute_model(SimpleNamespace(total_num_scheduled_tokens=1))


def test_plugin_registers_both_names_on_both_sides_and_may_run_again():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from refit_transport.engines.vllm.plugin import BACKENDS, register

    register()
    register()
    for factory, name in (
        (WeightTransferEngineFactory, "ReshardEngine"),
        (WeightTransferTrainerFactory, "ReshardTrainerEngine"),
    ):
        assert [factory._registry[backend]().__name__ for backend in BACKENDS] == [name, name]


def test_refit_over_a_session_equals_a_fresh_engine(engine, checkpoints):
    assert status_of(engine.llm)[0]["state"] == "unjoined"
    assert outputs_of(engine.llm) == engine.fresh["a"]
    server, client, trainer = joined(engine.llm, checkpoints["b"])
    try:
        with pytest.raises(RuntimeError, match=r"STALE and must not generate.*no weights yet"):
            compute(engine.llm)
        report = trainer.send_weights()
        assert fingerprint_of(engine.llm) == engine.fingerprint
        assert outputs_of(engine.llm) == engine.fresh["b"]
        status = status_of(engine.llm)[0]
        assert (status["state"], status["version"], status["error"]) == ("fresh", report.version, None)
        assert status["report"]["bytes_reshard"] == report.bytes_reshard > 0
        assert engine.llm.get_weight_version() == str(report.version)
        assert (client.resets, client.encoder_resets) == (1, 1)
        assert trainer.send_weights().version == report.version + 1
    finally:
        trainer.shutdown()
        engine.llm.shutdown_weight_transfer_engine()
        server.close()


def test_a_torn_engine_refuses_to_generate_until_a_refit_heals_it(engine, checkpoints, monkeypatch):
    from refit_transport.engines.vllm.sink import VllmSink

    def fail(self, version):
        raise OSError("disk of rank 1 on fire")

    server, _, trainer = joined(engine.llm, checkpoints["a"])
    with monkeypatch.context() as patch:
        patch.setattr(VllmSink, "commit", fail)
        with pytest.raises(RuntimeError, match="on fire"):
            trainer.send_weights()
    trainer.shutdown()
    server.close()
    status = status_of(engine.llm)[0]
    assert (status["state"], "on fire" in status["error"]) == ("stale", True)
    with pytest.raises(RuntimeError, match=r"from version -1 to version 0 failed.*on fire"):
        compute(engine.llm)
    server, _, trainer = joined(engine.llm, checkpoints["a"])
    trainer.send_weights()
    assert outputs_of(engine.llm) == engine.fresh["a"]
    trainer.shutdown()
    server.close()


def test_a_checkpoint_that_does_not_fill_the_engine_is_refused_before_any_byte(engine, checkpoints):
    before = fingerprint_of(engine.llm)
    with pytest.raises(RuntimeError, match=r"written by nobody: model.layers.1.mlp.gate_up_proj.weight"):
        joined(engine.llm, checkpoints["a"], leave_out=["model.layers.1.mlp.up_proj.weight"])
    assert fingerprint_of(engine.llm) == before


class Torn:
    """A member whose refits fail."""

    def refit(self, version: int, timeout: float | None = None) -> None:
        raise RuntimeError("trainer rank 0 died")


def bare_engine(**parallel: Any) -> Any:
    """The engine of one of several workers, without vLLM around it."""
    from refit_transport.engines.vllm.engine import ReshardEngine

    engine = object.__new__(ReshardEngine)
    sizes = dict(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0)
    defaults = dict(world_size=2, rank=0, distributed_executor_backend="mp")
    engine.parallel_config = SimpleNamespace(**{**sizes, **defaults, **parallel})
    engine._member, engine._sink, engine._refusal = Torn(), None, None
    engine._status = {"state": "fresh", "version": 3, "error": None, "report": None}
    engine._worker = SimpleNamespace(_weight_update_active=True)
    return engine


@pytest.mark.parametrize(
    ("parallel", "raises"),
    [
        ({"rank": 0}, False),
        ({"rank": 1}, True),
        ({"rank": 0, "world_size": 1}, True),
        ({"rank": 0, "distributed_executor_backend": "external_launcher"}, True),
    ],
)
def test_only_the_last_worker_raises_and_every_worker_is_stale(parallel, raises):
    engine = bare_engine(**parallel)
    if raises:
        with pytest.raises(RuntimeError, match="version 4 failed: trainer rank 0 died"):
            engine.update_weights({"version": 4})
    else:
        engine.update_weights({"version": 4})
        assert engine._worker._weight_update_active is False
    status = engine.refit_status()
    assert (status["state"], status["version"]) == ("stale", 3)
    assert "from version 3 to version 4" in engine._refusal


def test_init_info_is_plain_data_and_unknown_keys_are_refused():
    engine = bare_engine()
    info = engine.parse_init_info(
        {"address": "10.0.0.1:7", "rank_offset": 4, "options": {"serve_initial_weights": True}}
    )
    assert (info.rank_offset, info.timeout, info.domain) == (4, None, None)
    with pytest.raises(ValueError, match="rank_ofset"):
        engine.parse_init_info({"address": "10.0.0.1:7", "rank_ofset": 4})


def test_idle_steps_run_on_a_stale_engine():
    from refit_transport.engines.vllm.worker_hooks import guard_execution

    worker = SimpleNamespace(execute_model=lambda step: "ran")
    guard_execution(worker, lambda: "torn")
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=0)) == "ran"
    with pytest.raises(RuntimeError, match="torn"):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=3))


def test_the_engine_finds_the_worker_that_builds_it(engine):
    worker = worker_of(engine.llm)
    assert worker.weight_transfer_engine._worker is worker
    assert isinstance(worker.get_model(), torch.nn.Module)
