"""What the CPU platform needs after a refit. Each repair is needed: without it the engine computes something else.

When one of these fails because the engine is right without the repair, vLLM does it itself: drop the repair.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm_engines import LocalRefit, outputs_of, start_engine, worker_of

from refit_transport.engines.vllm.sink import VllmSink
from tests.models import make_model, read_checkpoint

pytestmark = pytest.mark.engine

REPAIRS = [
    pytest.param("qwen3_moe", "repack_experts", id="expert weights are packed on the first load only"),
    pytest.param("qwen3_tied", "refresh_embeddings", id="a tied head keeps its packed copy"),
    pytest.param("nemotron_h", "refresh_conv_weights", id="Mamba keeps a view of the unpacked convolution"),
]


@pytest.mark.parametrize(("family", "repair"), REPAIRS)
def test_without_the_repair_the_engine_is_wrong(families, monkeypatch, family, repair):
    from refit_transport.engines.vllm import cpu_fixups

    family = families(family)
    refit = LocalRefit(family.sink(), family.checkpoints["a"])
    with monkeypatch.context() as patch:
        patch.setattr(cpu_fixups, repair, lambda *_: None)
        refit.bring(family.checkpoints["b"])
        assert outputs_of(family.llm) != family.fresh["b"]
    refit.bring(family.checkpoints["b"])
    assert outputs_of(family.llm) == family.fresh["b"]
    refit.bring(family.checkpoints["a"])


def test_vllms_own_loading_of_gpt_oss_leaves_experts_stale_and_recorded_copies_do_not(families):
    """Its loader copies into the parameters past their weight loaders, which is all that vLLM's reload listens to."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    family = families("gpt_oss")
    config = worker_of(family.llm).vllm_config
    with set_current_vllm_config(config), torch.no_grad():
        initialize_layerwise_reload(family.model)
        family.model.load_weights(iter({n: t.clone() for n, t in family.checkpoints["b"].items()}.items()))
        finalize_layerwise_reload(family.model, config.model_config)
    assert outputs_of(family.llm) != family.fresh["b"]
    refit = LocalRefit(family.sink(), family.checkpoints["a"])
    refit.bring(family.checkpoints["b"])
    assert outputs_of(family.llm) == family.fresh["b"]
    refit.bring(family.checkpoints["a"])


def test_experts_of_other_ranks_get_no_weight_and_local_ones_their_own_id(monkeypatch):
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    from refit_transport.engines.vllm.cpu_fixups import map_expert_ids

    seen = {}

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *rest):
        seen.update(weights=topk_weights.tolist(), ids=topk_ids.tolist())

    monkeypatch.setattr(CPUUnquantizedExperts, "apply", apply)
    map_expert_ids()
    map_expert_ids()
    expert_map = torch.tensor([-1, -1, 0, 1])
    weights, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([[0, 3]], dtype=torch.int32)
    CPUUnquantizedExperts.apply(None, None, None, None, None, weights, ids, None, 4, expert_map, *[None] * 6)
    assert seen == {"weights": [[0.0, 0.75]], "ids": [[0, 1]]}


def test_pipeline_buffers_are_allocated_once():
    from refit_transport.engines.vllm.cpu_fixups import allocate_pipeline_buffers

    made = []
    runner = SimpleNamespace(
        intermediate_tensors=None,
        max_num_tokens=16,
        device="cpu",
        model_config=SimpleNamespace(dtype=torch.float32),
        model=SimpleNamespace(make_empty_intermediate_tensors=lambda **kwargs: made.append(kwargs) or "buffers"),
    )
    allocate_pipeline_buffers(runner)
    allocate_pipeline_buffers(runner)
    assert runner.intermediate_tensors == "buffers"
    assert made == [{"batch_size": 16, "dtype": torch.float32, "device": "cpu"}]


def test_live_linear_weights_are_written_in_place(tmp_path, monkeypatch):
    """The mode that unquantised models have on CUDA: no staging, views that stay valid from refit to refit."""
    from vllm.model_executor.layers.linear import LinearBase

    from refit_transport.engines.vllm.cpu_fixups import keep_linear_weights_live

    monkeypatch.setattr(LinearBase, "_cpu_skip_gemm_dispatch", False, raising=False)
    keep_linear_weights_live()
    paths = {which: make_model("qwen3", tmp_path / which, seed) for seed, which in enumerate("ab")}
    engines = {which: start_engine(path) for which, path in paths.items()}
    fresh = {which: outputs_of(llm) for which, llm in engines.items()}
    checkpoints = {which: read_checkpoint(path) for which, path in paths.items()}
    worker = worker_of(engines["a"])
    refit = LocalRefit(VllmSink(worker.get_model(), worker.vllm_config, torch.device("cpu")), checkpoints["a"])
    assert set(refit.sink.modes().values()) == {"live"}
    assert refit.sink.begin(1) is False
    refit.sink.abort()
    for which in "baba":
        refit.bring(checkpoints[which])
        assert outputs_of(engines["a"]) == fresh[which]
    assert refit.peak_staged_bytes == 0
    _ALIVE.extend(engines.values())


_ALIVE: list[object] = []
"""vLLM's process groups are global and end with the first engine that is dropped."""
