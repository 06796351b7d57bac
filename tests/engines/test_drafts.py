"""A refit brings the draft model of speculative decoding to the version of its target, or says that it is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from drafted_models import DRAFTS, Drafted
from vllm_engines import LocalRefit, fingerprint_of, outputs_of, start_engine, worker_of
from vllm_sessions import joined, status_of

pytestmark = pytest.mark.engine

PREDICTION = ("deepseek_v3, mtp", "qwen3_next, mtp")
SEPARATE = ("llama, eagle", "qwen3, draft_model")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class Pair:
    """Models A and B of one kind: a live engine of A, and what fresh engines of both put out."""

    def __init__(self, models: dict[str, Drafted]) -> None:
        self.models = models
        self.engines = {which: start_engine(m.path, speculative_config=m.speculation) for which, m in models.items()}
        self.llm = self.engines["a"]
        self.fresh = {which: outputs_of(llm) for which, llm in self.engines.items()}
        self.fingerprints = {which: fingerprint_of(llm) for which, llm in self.engines.items()}

    def sink(self) -> Any:
        from refit_transport.engines.vllm.draft import worker_sink

        worker = worker_of(self.llm)
        return worker_sink(worker, worker.get_model(), worker.vllm_config, torch.device("cpu"))

    def sent(self, which: str, draft: bool = True) -> dict[str, torch.Tensor]:
        model = self.models[which]
        return {name: tensor for name, tensor in model.tensors.items() if draft or name not in model.of_draft}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    folder = tmp_path_factory.mktemp("drafts")
    return cache(lambda kind: Pair({w: DRAFTS[kind](folder / f"{kind}-{w}", seed) for seed, w in enumerate("ab")}))


def of_draft(prints: dict[str, str]) -> dict[str, str]:
    return {path: digest for path, digest in prints.items() if path.startswith("draft.")}


@pytest.mark.parametrize("direct", ["all", "ffn", "none"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_draft_and_target_equal_those_of_a_fresh_engine(kind, direct, pairs):
    pair = pairs(kind)
    chosen = {
        "all": pair.sent("a"),
        "ffn": [n for n in pair.sent("a") if any(f in n for f in FEED_FORWARD)],
        "none": (),
    }
    refit = LocalRefit(pair.sink(), pair.sent("a"), frozenset(chosen[direct]))
    assert refit.description.left_out == frozenset()
    changed = of_draft(pair.fingerprints["a"]).items() - of_draft(pair.fingerprints["b"]).items()
    assert len(changed) >= 10
    for which in "baba":
        refit.bring(pair.sent(which))
        assert fingerprint_of(pair.llm) == pair.fingerprints[which]
        assert outputs_of(pair.llm) == pair.fresh[which]


@pytest.mark.parametrize("kind", PREDICTION)
def test_modules_shared_with_the_target_are_written_once_and_their_copies_do_not_travel(kind, pairs):
    pair = pairs(kind)
    description = LocalRefit(pair.sink(), pair.sent("a")).description
    copies = {name for name in pair.models["a"].of_draft if "embed_tokens" in name or "shared_head.head" in name}
    assert description.ignored == copies
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= description.direct.keys()


def test_a_name_that_both_models_need_travels_whole_and_says_so(pairs):
    pair = pairs("qwen3, itself")
    description = LocalRefit(pair.sink(), pair.sent("a")).description
    assert (description.whole, description.direct) == (pair.sent("a").keys(), {})
    assert set(description.reasons.values()) == {"the engine's model and its draft model both need it"}


def keeps(path: str, kind: str) -> bool:
    """Whether a tensor at ``path`` is the draft's own."""
    shared = kind != "qwen3, draft_model" and any(
        name in path for name in ("embed_tokens", "lm_head", "shared_head.head")
    )
    return path.startswith("draft.") and not shared


@pytest.mark.parametrize("kind", [*PREDICTION, *SEPARATE])
def test_a_draft_that_no_trainer_sends_keeps_its_values_and_is_named(kind, pairs):
    pair = pairs(kind)
    full = LocalRefit(pair.sink(), pair.sent("a"))
    refit = LocalRefit(pair.sink(), pair.sent("a", draft=False))
    own = {path for path in full.sink.modes() if path.startswith("draft.")}
    assert {path.rpartition(".")[0] for path in refit.description.left_out} == own
    refit.bring(pair.sent("b", draft=False))
    before, after = pair.fingerprints["a"], pair.fingerprints["b"]
    expected = {path: (before if keeps(path, kind) else after)[path] for path in after}
    assert fingerprint_of(pair.llm) == expected
    assert outputs_of(pair.llm) == pair.fresh["b"]
    full.bring(pair.sent("a"))
    assert fingerprint_of(pair.llm) == before


@pytest.mark.parametrize(
    ("leave_out", "text"),
    [
        ("up_proj", r"written by nobody"),
        ("down_proj", r"in part: .*w2_weight"),
    ],
)
def test_a_draft_that_is_sent_in_part_is_refused_by_name(leave_out, text, pairs):
    pair = pairs("deepseek_v3, mtp")
    sent = {n: t for n, t in pair.sent("a").items() if n not in pair.models["a"].of_draft or leave_out not in n}
    with pytest.raises(ValueError, match=text):
        LocalRefit(pair.sink(), sent)


def test_tensors_of_a_draft_are_nobodys_on_an_engine_without_one(pairs):
    from refit_transport.engines.vllm.draft import worker_sink

    pair = pairs("llama, eagle")
    worker = worker_of(pair.llm)
    sink = worker_sink(None, worker.get_model(), worker.vllm_config, torch.device("cpu"))
    assert LocalRefit(sink, pair.sent("a")).description.ignored == pair.models["a"].of_draft


@pytest.mark.parametrize("draft", [True, False])
def test_a_session_moves_the_draft_in_its_version_or_says_that_it_is_left_out(draft, pairs, caplog):
    pair = pairs("deepseek_v3, mtp")
    model = pair.models["b"]
    left_out = () if draft else model.of_draft
    LocalRefit(pair.sink(), pair.sent("a")).bring(pair.sent("a"))
    with caplog.at_level("INFO", "refit_transport"):
        server, _, trainer = joined(pair.llm, model.path, leave_out=left_out)
    try:
        report = trainer.send_weights()
        status = status_of(pair.llm)[0]
        assert (status["state"], status["version"]) == ("fresh", report.version)
        assert (fingerprint_of(pair.llm) == pair.fingerprints["b"]) == draft
        lines = [record.message for record in caplog.records if record.message.startswith("plan ")]
        assert len(lines) == 1
        assert ("draft model left out, since no trainer sends it: draft.model.layers.2." in lines[0]) != draft
        assert ("not needed by any engine: model.layers.2.embed_tokens" in lines[0]) == draft
    finally:
        trainer.shutdown()
        pair.llm.shutdown_weight_transfer_engine()
        server.close()


@pytest.mark.slow
def test_each_worker_holds_its_part_of_the_draft(tmp_path):
    models = {which: DRAFTS["qwen3_next, mtp"](tmp_path / which, seed) for seed, which in enumerate("ab")}
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    llm = start_engine(models["b"].path, speculative_config=models["b"].speculation, **parallel)
    fresh, before = outputs_of(llm), llm.collective_rpc("weight_fingerprint")
    for which in "ab":
        server, _, trainer = joined(llm, models[which].path, workers=2)
        trainer.send_weights()
        now = llm.collective_rpc("weight_fingerprint")
        changed = [
            {path for path in of_draft(was) if was[path] != new[path]} for was, new in zip(before, now, strict=True)
        ]
        assert [len(paths) > 10 for paths in changed] == [which == "a"] * 2
        trainer.shutdown()
        llm.shutdown_weight_transfer_engine()
        server.close()
    assert llm.collective_rpc("weight_fingerprint") == before
    assert outputs_of(llm) == fresh
    llm.llm_engine.engine_core.shutdown()
