"""The command: fast to start, short about mistakes, silent about nothing."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from refit_transport import cli
from refit_transport.cli_plan import job_from

BASE = "recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml"
PLAN = dict.fromkeys(("model", "train", "gen", "bucket_mib", "cluster")) | {"colocated": False}
SHAPES = "recipes/grpo-reverse-digits-1n5r-fsdp2-tp2-and-tp1.yaml"


@pytest.fixture(autouse=True)
def _in_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)


def test_help_starts_fast_and_imports_nothing_heavy(repository: Path) -> None:
    script = (
        "import sys, time; from refit_transport.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'vllm', 'ray', 'numpy', 'omegaconf'} & set(sys.modules)))\n"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    assert all(command in done.stdout for command in cli.COMMANDS)
    assert float(done.stdout.splitlines()[-1]) < 0.5  # of the processor, since other processes share this machine


def test_five_mistakes_print_five_lines_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = [
        "policy.generation.refit_transport=nccl",
        "policy.generation.colocated.enabled=true",
        "grpo.steps=3",
        "policy.generation.vllm_cfg.tensor_parallel_size=3",
        "loss_fn.reference_policy_kl_type=k4",
    ]
    assert cli.main(["grpo", "--config", BASE, *mistakes]) == cli.EXIT_USAGE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert {line.split(":")[0] for line in lines} == {mistake.split("=")[0] for mistake in mistakes}


PPO = "recipes/ppo-reverse-digits-1n4r-fsdp2-tp2.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "nosuch.yaml"], "no such configuration: nosuch.yaml"),
        (["validate", BASE, "grpo.seed"], "not of the form key=value"),
        (["grpo", "--config", "nosuch.yaml"], "no such configuration"),
        (["ppo", "--config", BASE], "a recipe of ppo"),
        (["ppo", "--config", PPO, "policy.generation.colocated.enabled=true"], "policy.generation.colocated.enabled"),
        (["grpo", "--config", BASE, "policy.model_name=/no/model"], "a checkpoint's directory, or one of tiny/qwen3"),
        (["classify", "nosuch"], "nosuch"),
    ],
)
def test_mistakes_are_one_line_with_code_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == cli.EXIT_USAGE
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_an_error_that_does_not_explain_itself_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    import refit_transport.cli_transports as command

    monkeypatch.setattr(command, "run", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["transports"])


def test_a_plan_of_different_engines_is_refused_with_their_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", SHAPES]) == cli.EXIT_USAGE
    assert "policy.generation.replicas: found engines of TP2, TP1" in capsys.readouterr().err
    assert cli.main(["validate", SHAPES]) == 0
    assert "-> 1 engine(s) of 2 ranks (TP2) + 1 engine(s) of 1 ranks (TP1)" in capsys.readouterr().out


EXPERTS = "recipes/grpo-reverse-digits-moe-1n4r-fsdp2-tp2.yaml"
STAGES = "recipes/grpo-reverse-digits-1n4r-megatron-pp2vpp2-tp2.yaml"


def changed(recipe: str, change: str, folder: Path) -> SimpleNamespace:
    """Arguments of ``plan`` for a recipe that differs from ``recipe`` in one line."""
    (folder / "recipe.yaml").write_text(f"defaults: {Path(recipe).resolve()}\npolicy: {change}\n")
    return SimpleNamespace(**PLAN | {"config": str(folder / "recipe.yaml")})


@pytest.mark.parametrize(
    ("recipe", "change", "notes"),
    [
        (EXPERTS, "{dtensor_cfg: {expert_parallel_size: 2}}", ["policy.dtensor_cfg.expert_parallel_size 2 is not"]),
        (
            STAGES,
            "{megatron_cfg: {pipeline_model_parallel_layout: Et|t|t|tL}}",
            ["Stages are shown with equal numbers"],
        ),
        (STAGES, "{}", []),
        (BASE, "{}", []),
    ],
)
def test_a_plan_of_a_recipe_says_what_it_does_not_show(recipe: str, change: str, notes: list, tmp_path: Path) -> None:
    found = job_from(changed(recipe, change, tmp_path)).notes
    assert len(found) == len(notes) and all(a.startswith(b) for a, b in zip(found, notes))


def test_a_plan_of_a_recipe_has_the_options_of_its_transport(tmp_path: Path) -> None:
    change = "{generation: {refit_transport: null, refit_cfg: {gather_broadcast: {root: single}}}}"
    assert job_from(changed(BASE, change, tmp_path)).options.broadcast_root == "single"


def test_validate_says_what_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", BASE]) == 0
    assert "2 dtensor trainer ranks -> 1 engine(s) of 2 ranks (TP2)" in capsys.readouterr().out


def test_validate_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", BASE, "--resolved"]) == 0
    assert "refit_transport: nccl_reshard" in capsys.readouterr().out


def test_classify_totals_a_model_by_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", "tiny/qwen3-moe"]) == 0
    shown = capsys.readouterr().out
    assert "reshard    expert" in shown
    assert "broadcast  router" in shown


def test_classify_reads_the_headers_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [10, 4], "data_offsets": [0, 80]},
        "model.layers.0.mlp.up_proj.weight": {"dtype": "F8_E4M3", "shape": [8, 4], "data_offsets": [80, 112]},
        "model.layers.0.mlp.down_proj.weight": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [112, 144]},
        "mtp.fc.weight": {"dtype": "F8_E4M3", "shape": [4, 8], "data_offsets": [144, 176]},
    }
    encoded = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    assert cli.main(["classify", str(tmp_path), "--names"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "reshard    model.layers.0.mlp.up_proj.weight  8x4 float8_e4m3fn  dense" in lines[2]
    assert lines[-1].startswith("1 tensors of multi-token prediction are sent to engines that draft with")


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    assert cli.main(["classify", str(tmp_path)]) == cli.EXIT_USAGE
    assert "model.safetensors has no readable safetensors header" in capsys.readouterr().err


def test_transports_lists_what_can_be_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["transports"]) == 0
    shown = capsys.readouterr().out
    assert "nccl_reshard" in shown
    assert "what null means" in shown
