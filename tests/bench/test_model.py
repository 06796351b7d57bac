"""A preset, scaled down, lies on the meshes of a benchmark as its axes say; what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from refit_transport.bench.config import BenchConfigError, load
from refit_transport.bench.workload import regions, tensors_of

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "bench"
EXPERT = "model.layers.5.mlp.experts.{}.down_proj.weight"


def boxes(tensor, side: str) -> dict[int, tuple]:
    held = regions(getattr(tensor, side), tensor.logical.shape)
    return {rank: (box.start, box.stop) for rank, box in held.items()}


def test_axes_place_tensors_by_their_names() -> None:
    by_name = {t.logical.name: t for t in tensors_of(load(CONFIGS / "deepseek-pp2-ep2.yaml"))}
    first_of_second = by_name[EXPERT.format(16)]
    assert first_of_second.logical.shape == (768, 256)
    assert boxes(first_of_second, "trainers") == {3: ((0, 0), (768, 256))}, "stage 1, second half of the experts"
    assert boxes(first_of_second, "engines") == {4 + i: ((0, 64 * i), (768, 64 * i + 64)) for i in range(4)}
    assert set(boxes(by_name["model.embed_tokens.weight"], "trainers")) == {0, 1}
    assert set(boxes(by_name["lm_head.weight"], "trainers")) == {2, 3}
    assert by_name["model.layers.2.mlp.gate.e_score_correction_bias"].logical.dtype == "float32"


def test_fsdp_cuts_rows_but_leaves_experts_whole() -> None:
    by_name = {t.logical.name: t for t in tensors_of(load(CONFIGS / "moe-all.yaml"))}
    assert len(by_name) == 2523
    assert boxes(by_name[EXPERT.format(8)], "trainers") == {1: ((0, 0), (512, 96))}
    assert boxes(by_name["model.norm.weight"], "trainers") == {i: ((128 * i,), (128 * i + 128,)) for i in range(4)}


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["model.preset=gpt-7"], r"model.preset: got 'gpt-7', allowed: llama-3.2-1b"),
        (["model.hidden_sizes=8"], r"model.hidden_sizes: not a key of deepseek-v3; did you mean hidden_size\?"),
        (["trainers.mesh={pp: 3, ep: 2}", "cluster.domains=[]"], r"trainers.mesh.pp: got 3, allowed: a divisor of 8"),
        (["trainers.mesh={rows: 4}"], r"trainers.mesh.rows: with a model, allowed: dp, pp, fsdp, ep, tp"),
        (["model=null"], "exactly one of the two"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(BenchConfigError, match=said):
        load(CONFIGS / "deepseek-pp2-ep2.yaml", overrides)


def test_more_engine_ranks_than_key_value_heads_are_refused() -> None:
    with pytest.raises(BenchConfigError, match=r"engines.mesh.tp: got 4, but .*k_proj.weight has 2 heads"):
        load(CONFIGS / "moe-all.yaml", ["engines.mesh={tp: 4}"])
