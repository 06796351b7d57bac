"""`refit-transport plan`: figures as JSON, tables, a recipe as input, and one error for all mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refit_transport.cli import EXIT_USAGE, main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "grpo-reverse-digits-1n4r-fsdp2-tp2.yaml")
SIZES = ["plan", "--model", "qwen3-0.6b", "--train", "tp=2,pp=2", "--gen", "tp=2,dp=2"]
FIGURES = {"predicted_seconds", "bound_seconds", "bytes", "busiest_send_over_mean", "busiest_recv_over_mean",
           "messages", "buckets", "peak_extra_bytes_per_rank", "limited_by"}  # fmt: skip


def _json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict:
    assert main([*arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_every_promised_figure_of_every_transport_and_scope(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, SIZES)
    assert data["plan_seconds"] > 0
    assert len(data["digest"]) >= 32
    found = {(transport, scope) for transport, scopes in data["transports"].items() for scope in scopes}
    assert found == {("nccl_reshard", "ffn"), ("nccl_reshard", "all"), ("gather_broadcast", "all")}
    for scopes in data["transports"].values():
        for figures in scopes.values():
            assert figures.keys() >= FIGURES
            assert figures["bytes"].keys() == {"network", "in_domain", "local"}
            assert 0 < figures["bound_seconds"] <= figures["predicted_seconds"]


def test_the_digest_depends_on_the_layout_and_on_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (_json(capsys, SIZES)["digest"] for _ in range(2))
    other = _json(capsys, [*SIZES[:-1], "tp=4"])["digest"]
    assert first == again != other


def test_scope_limits_the_outcomes_and_leads_them(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, [*SIZES, "--scope", "all"])
    assert list(data["transports"]["nccl_reshard"]) == ["all"]
    assert data["digest"] == data["transports"]["nccl_reshard"]["all"]["digest"]


def test_the_tables_name_transports_units_and_assumptions(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main(SIZES) == 0
    out = capsys.readouterr().out
    for text in (
        "nccl_reshard, scope ffn",
        "gather_broadcast",
        "predicted time",
        "share of the bound",
        "ms",
        "Assumptions",
    ):
        assert text in out


def test_a_recipe_is_planned_with_its_own_model_layouts_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, ["plan", "--config", RECIPE])
    assert (data["model"]["name"], data["train"]["fsdp"], data["gen"]["tp"]) == ("tiny/qwen3", 2, 2)
    assert data["cluster"]["name"] == "cpu-host"


def test_files_are_written_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "new" / "plan.html", tmp_path / "plan.json"
    assert main([*SIZES, "--html", str(page), "--json", str(figures)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(figures.read_text())["model"]["name"] == "qwen3-0.6b"
    assert str(page) in capsys.readouterr().out


def test_the_bucket_size_bounds_the_extra_memory(capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(capsys, [*SIZES, "--scope", "all", "--bucket-mib", "16"])
    assert data["transports"]["nccl_reshard"]["all"]["peak_extra_bytes_per_rank"] <= 2 * (16 << 20)


def test_a_model_that_only_transformers_knows_is_planned_by_its_names(tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "olmo2", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = _json(capsys, ["plan", "--model", str(tmp_path), "--train", "tp=2", "--gen", "tp=2"])
    assert any("guessed from their names" in note for note in data["assumptions"])
    assert data["transports"]["nccl_reshard"]["ffn"]["bytes_by_path"]["reshard"]["tensors"] == 6


def test_every_mistake_is_named_in_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = ["plan", "--model", "qwen3-4b", "--train", "tp=0,foo=1", "--gen", "tp=3,ep=4", "--cluster", "nope",
                "--bucket-mib", "0"]  # fmt: skip
    assert main(mistakes) == EXIT_USAGE
    error = capsys.readouterr().err
    for text in ("unknown size 'foo'", "tp must be at least 1", "ep = 4 must be 1", "no preset and no file 'nope'",
                 "--bucket-mib must be at least 1"):  # fmt: skip
        assert text in error
    assert "Traceback" not in error


def test_sizes_that_do_not_fit_the_model_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-4b", "--train", "ep=2", "--gen", "pp=40"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "qwen3-4b has no experts" in error
    assert "has only 36 layers" in error


def test_missing_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-4b"]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert "--train is missing" in error
    assert "--gen is missing" in error


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main([*SIZES, option, str(blocked / "plan")]) == EXIT_USAGE
    assert f"cannot write {blocked}" in capsys.readouterr().err


def test_a_recipe_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "recipes/nothing.yaml"]) == EXIT_USAGE
    assert "nothing.yaml" in capsys.readouterr().err


def test_an_assumed_cluster_is_among_the_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    note = "No --cluster was given: dgx-h100 is assumed."
    assert note in _json(capsys, SIZES)["assumptions"]
    assert note not in _json(capsys, [*SIZES, "--cluster", "dgx-h100"])["assumptions"]
