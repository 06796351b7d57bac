"""vLLM's trainer-side interface says what its clients cannot do."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (1, 0)])
def test_a_client_that_cannot_reset_the_prefix_cache_is_named_once(rank, warnings, caplog):
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from refit_transport.engines.vllm.trainer_engine import ReshardTrainerEngine, ReshardTrainerInitInfo

    info = ReshardTrainerInitInfo(rank=rank, address="10.0.0.1:7", trainers=2, engine_ranks=(1, 1, 1))
    complete = SimpleNamespace(reset_prefix_cache=lambda: None)
    clients = [HTTPVLLMWeightSyncClient("http://10.0.0.2"), HTTPVLLMWeightSyncClient("http://10.0.0.3"), complete]
    with caplog.at_level(logging.WARNING, "refit_transport"):
        ReshardTrainerEngine(info=info, client=clients if rank == 0 else None, source=None).shutdown()
    said = [record.getMessage() for record in caplog.records if record.name == "refit_transport"]
    assert [text.startswith("HTTPVLLMWeightSyncClient has no method") for text in said] == [True] * warnings
