"""Experts spread over the ranks of an engine, however vLLM places them: the destination follows the expert map."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from vllm_engines import start_engine
from vllm_sessions import joined, status_of

from tests.models import make_model

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Case:
    """Experts of a model over ``data`` x ``tensor`` ranks, and who shall hold which."""

    family: str
    experts: int
    tensor: int
    held: tuple[tuple[int, ...], ...]
    placement: str = "linear"
    data: int = 1


def _runs(*lengths: int) -> tuple[tuple[int, ...], ...]:
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return tuple(tuple(range(start, start + length)) for start, length in zip(starts, lengths, strict=True))


def _dealt(experts: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(rank, experts, ranks)) for rank in range(ranks))


CASES = {
    "EP2": Case("qwen3_moe", 8, 2, _runs(4, 4)),
    "EP4": Case("qwen3_moe", 8, 4, _runs(2, 2, 2, 2)),
    "EP4, uneven": Case("qwen3_moe", 7, 4, _runs(2, 2, 2, 1)),
    "EP2 of fused experts": Case("gpt_oss", 4, 2, _runs(2, 2)),
    "EP2, round-robin": Case("deepseek_v3", 8, 2, _dealt(8, 2), "round_robin"),
    "EP4, round-robin, uneven": Case("deepseek_v3", 10, 4, _dealt(10, 4), "round_robin"),
    "EP4 over two data-parallel cores": Case("qwen3_moe", 8, 2, _runs(2, 2, 2, 2), data=2),
    "EP2, round-robin without grouped routing": Case("qwen3_moe", 8, 2, _runs(4, 4), "round_robin"),
    "EP2 over two data-parallel cores, round-robin": Case("deepseek_v3", 8, 1, _runs(4, 4), "round_robin", 2),
}
"""vLLM falls back to linear placement in the last two: without expert groups, and with an exchange of tokens between
data-parallel cores other than DeepEP's low-latency one or NIXL's."""

EXPERTS_KEY = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks of every case report."""
    folder = tmp_path_factory.mktemp("placement")
    paths: dict[tuple[str, int], dict[str, str]] = {}
    for case in CASES.values():
        key = case.family, case.experts
        if key not in paths:
            sizes = {EXPERTS_KEY[case.family]: case.experts}
            paths[key] = {
                which: str(make_model(case.family, folder / f"{case.family}-{case.experts}-{which}", seed, **sizes))
                for seed, which in enumerate("ab")
            }
    cases = {name: {**asdict(case), "paths": paths[case.family, case.experts]} for name, case in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.engines.placed_experts", folder / "cases.json", folder / "found.json"]
    done = subprocess.run(command, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_receives_its_own_experts_and_equals_a_fresh_one(name, found):
    case, ranks = CASES[name], found[name]
    failures = [rank for rank in ranks if isinstance(rank, str)]
    assert not failures, failures[0]
    for rank, experts in zip(ranks, case.held, strict=True):
        assert (tuple(rank["experts"]), rank["whole"]) == (experts, [])
        assert rank["wrong"] == []
        assert rank["unchanged_experts"] == []
    assert [rank["place"] for rank in ranks] == [
        [index // case.tensor, 0, index % case.tensor, index] for index in range(len(ranks))
    ]


@pytest.mark.slow
def test_an_engine_with_round_robin_experts_is_refitted_to_what_it_was_loaded_with(tmp_path):
    paths = {which: make_model("deepseek_v3", tmp_path / which, seed) for seed, which in enumerate("ab")}
    llm = start_engine(
        paths["b"], tensor_parallel_size=2, enable_expert_parallel=True, expert_placement_strategy="round_robin"
    )
    try:
        before = llm.collective_rpc("weight_fingerprint")
        for rank, hashes in enumerate(before):
            expert_map = torch.full((8,), -1, dtype=torch.int32)
            expert_map[rank::2] = torch.arange(4, dtype=torch.int32)
            digest = hashlib.sha1(expert_map.numpy().tobytes()).hexdigest()
            assert {hashes[path] for path in hashes if path.endswith("_expert_map")} == {digest}
        for which in "ab":
            server, _, trainer = joined(llm, paths[which], workers=2)
            trainer.send_weights()
            now = llm.collective_rpc("weight_fingerprint")
            assert [len(was.items() - is_now.items()) > 10 for was, is_now in zip(before, now, strict=True)] == (
                [which == "a"] * 2
            )
            trainer.shutdown()
            llm.shutdown_weight_transfer_engine()
            server.close()
        assert now == before
        assert [status["labels"]["tp"] for status in status_of(llm)] == ["0", "1"]
    finally:
        llm.llm_engine.engine_core.shutdown()
