"""A refit through the sink leaves the engine equal, bit for bit, to one that was loaded from the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from vllm_engines import LocalRefit, bind_alone, fingerprint_of

pytestmark = pytest.mark.engine

FAMILIES = (
    "qwen3_moe",
    "qwen3_moe_uneven",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "qwen3",
    "qwen3_tied",
    "llama",
    "nemotron_h",
    "idefics3",
)
"""Those with experts first: vLLM makes its expert-parallel group only when the first engine of the process has some."""
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj", ".w1.", ".w2.", ".w3.", "gate_up_proj")


@pytest.fixture(params=FAMILIES)
def family(request, families):
    return families(request.param)


def scope(checkpoint: dict[str, torch.Tensor], name: str) -> frozenset[str]:
    chosen = {"all": lambda n: True, "ffn": lambda n: any(f in n for f in FEED_FORWARD), "none": lambda n: False}[name]
    return frozenset(filter(chosen, checkpoint))


def test_recording_leaves_the_engine_as_it_was(family):
    before = {n: (id(t), t.data_ptr(), t.clone()) for n, t in family.model.state_dict(keep_vars=True).items()}
    LocalRefit(family.sink(), family.checkpoints["a"])
    after = family.model.state_dict(keep_vars=True)
    assert list(before) == list(after)
    for name, (identity, address, value) in before.items():
        assert (identity, address) == (id(after[name]), after[name].data_ptr()), name
        assert torch.equal(value, after[name]), name
    assert fingerprint_of(family.llm) == family.fingerprints["a"]


@pytest.mark.parametrize("direct", ["all", "ffn", "none"])
def test_refit_equals_a_fresh_engine_of_the_same_weights(family, direct):
    assert family.fresh["a"] != family.fresh["b"]
    refit = LocalRefit(family.sink(), family.checkpoints["a"], scope(family.checkpoints["a"], direct))
    for which in "ba":
        refit.bring(family.checkpoints[which])
        assert family.outputs() == family.fresh[which]
        assert fingerprint_of(family.llm) == family.fingerprints[which]


def test_trainers_in_float32_leave_the_same_engine(family):
    masters = {name: tensor.float() for name, tensor in family.checkpoints["b"].items()}
    refit = LocalRefit(family.sink(), masters)
    refit.bring(masters)
    assert fingerprint_of(family.llm) == family.fingerprints["b"]
    refit.bring({name: tensor.float() for name, tensor in family.checkpoints["a"].items()})
    assert fingerprint_of(family.llm) == family.fingerprints["a"]


def test_dtypes_are_those_in_the_engines_memory(family):
    refit = LocalRefit(family.sink(), family.checkpoints["a"])
    held = {str(t.dtype).removeprefix("torch.") for t in family.model.state_dict().values()}
    assert set(refit.description.dtypes) == set(refit.description.direct) | refit.description.whole
    assert set(refit.description.dtypes.values()) <= held
    router_biases = [n for n in refit.description.dtypes if n.endswith("e_score_correction_bias")]
    assert {refit.description.dtypes[n] for n in router_biases} <= {"float32"}


def test_tenth_refit_equals_the_first(family):
    refit = LocalRefit(family.sink(), family.checkpoints["a"])
    for which in "ba" * 5:
        refit.bring(family.checkpoints[which])
        assert fingerprint_of(family.llm) == family.fingerprints[which], refit.version
    assert family.outputs() == family.fresh["a"]


def test_staging_memory_is_that_of_the_modules_in_flight(family):
    refit = LocalRefit(family.sink(), family.checkpoints["a"])
    refit.bring(family.checkpoints["a"])
    total = sum(t.nbytes for t in family.checkpoints["a"].values())
    assert refit.sink.staged_bytes == 0
    assert 0 < refit.peak_staged_bytes < total


def test_a_bound_refit_stages_the_modules_in_flight_only_and_binds_once(family):
    sink, held = family.sink(), {name: tensor.clone() for name, tensor in family.checkpoints["a"].items()}
    binding = bind_alone(sink, held)
    assert sink.staged_bytes == 0
    peak = 0
    for version, which in enumerate("ba", start=1):
        for name, tensor in family.checkpoints[which].items():
            held[name].copy_(tensor)
        binding.begin(version)
        assert not binding.stale
        for bucket in binding.buckets:
            bucket.local.run()
            peak = max(peak, sink.staged_bytes)
            sink.arrived(bucket.direct, bucket.whole)
        sink.commit(version)
        assert fingerprint_of(family.llm) == family.fingerprints[which]
    assert 0 < peak < sum(tensor.nbytes for tensor in held.values())


def test_aborted_refit_leaves_an_engine_that_computes_and_that_the_next_refit_heals(family):
    refit = LocalRefit(family.sink(), family.checkpoints["a"])
    names = sorted(family.checkpoints["b"])
    refit.sink.begin(1)
    for name in names[: len(names) // 2]:
        refit.bring_one(name, family.checkpoints["b"][name])
    refit.sink.abort()
    assert not any(t.is_meta for t in family.model.state_dict().values())
    assert refit.sink.staged_bytes == 0
    family.outputs(tokens=2)
    refit.bring(family.checkpoints["a"])
    assert fingerprint_of(family.llm) == family.fingerprints["a"]
