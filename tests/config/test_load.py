"""Reading: inheritance, overrides, interpolation, types, and what is said when a file cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from refit_transport.config import ConfigError, load_config, read_config, save_resolved

ONLY_MODEL = "grpo: {}\npolicy: {model_name: tiny/qwen3}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_wins_over_what_it_extends_and_the_command_line_over_both(tmp_path: Path) -> None:
    write(tmp_path, "configs/root.yaml", ONLY_MODEL + "cluster: {num_nodes: 2, gpus_per_node: 8}\n")
    write(tmp_path, "configs/base.yaml", "defaults: root.yaml\ncluster: {num_nodes: 3}\n")
    recipe = write(tmp_path, "recipes/r.yaml", "defaults: ../configs/base.yaml\ncluster: {gpus_per_node: 4}\n")
    cluster = load_config(recipe, ["cluster.segment_size=9"]).cluster
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.segment_size) == (3, 4, 9)


def test_later_defaults_win_over_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", ONLY_MODEL + "cluster: {num_nodes: 2, gpus_per_node: 2}\n")
    write(tmp_path, "b.yaml", "cluster: {num_nodes: 5}\n")
    recipe = write(tmp_path, "r.yaml", "defaults: [a.yaml, b.yaml]\n")
    assert load_config(recipe).cluster.num_nodes == 5
    assert load_config(recipe).cluster.gpus_per_node == 2


def test_a_cycle_of_defaults_names_its_files(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "defaults: b.yaml\n")
    write(tmp_path, "b.yaml", "defaults: a.yaml\n")
    with pytest.raises(ConfigError, match=r"cycle.*a\.yaml.*b\.yaml.*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_a_file_extended_twice_is_no_cycle(tmp_path: Path) -> None:
    write(tmp_path, "root.yaml", ONLY_MODEL)
    write(tmp_path, "a.yaml", "defaults: root.yaml\n")
    write(tmp_path, "b.yaml", "defaults: root.yaml\n")
    recipe = write(tmp_path, "r.yaml", "defaults: [a.yaml, b.yaml]\n")
    assert load_config(recipe).policy.model_name == "tiny/qwen3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: missing.yaml\n", r"no such configuration: .*missing\.yaml \(named under defaults in .*r\.yaml\)"),
        ("grpo: [1, 2\n", "not valid YAML"),
        ("- 1\n- 2\n", "a configuration is a mapping"),
        ("defaults: {a: 1}\n", "defaults must be a path or a list of paths"),
        ("grpo: {}\npolicy: {model_name: '${nowhere.at_all}'}\n", "nowhere"),
    ],
)
def test_files_that_cannot_be_read_say_which_and_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, "r.yaml", text))


@pytest.mark.parametrize("override", ["novalue", "=3", "a..b=1", "policy.optimizer.kwargs=[1"])
def test_malformed_overrides_are_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config(write(tmp_path, "r.yaml", ONLY_MODEL), [override])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("grpo.max_num_steps=1e3", "grpo.max_num_steps", 1000),
        ("policy.max_grad_norm=1", "policy.max_grad_norm", 1.0),
        ("policy.max_grad_norm=null", "policy.max_grad_norm", None),
        ("policy.optimizer.kwargs.lr=1e-4", "policy.optimizer.kwargs.lr", 1e-4),
        ("policy.optimizer.kwargs={lr: 0.1}", "policy.optimizer.kwargs.lr", 0.1),
        ("logger.run_name=a=b", "logger.run_name", "a=b"),
        (
            "policy.generation.vllm_cfg.max_model_len=${policy.max_total_sequence_length}",
            "policy.precision",
            "bfloat16",
        ),
    ],
)
def test_overrides_take_the_type_of_their_key(tmp_path: Path, override: str, key: str, value: object) -> None:
    found = OmegaConf.select(load_config(write(tmp_path, "r.yaml", ONLY_MODEL), [override]), key)
    assert found == value
    assert type(found) is type(value)


def test_defaults_that_point_at_other_keys_follow_them(tmp_path: Path) -> None:
    recipe = write(tmp_path, "r.yaml", ONLY_MODEL)
    config = load_config(recipe, ["policy.precision=float32", "policy.max_total_sequence_length=77"])
    assert config.policy.generation.vllm_cfg.precision == "float32"
    assert config.policy.generation.max_new_tokens == 77
    assert config.policy.tokenizer.name == "tiny/qwen3"


def test_only_the_chosen_algorithm_has_its_sections(tmp_path: Path) -> None:
    assert "value" not in load_config(write(tmp_path, "g.yaml", ONLY_MODEL))
    ppo = load_config(write(tmp_path, "p.yaml", ONLY_MODEL.replace("grpo", "ppo")))
    assert "grpo" not in ppo
    assert ppo.value.model_name == "tiny/qwen3"
    assert ppo.value.optimizer.kwargs.lr == 1e-5


def test_every_value_knows_the_line_that_set_it(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "cluster:\n  num_nodes: 2\n  gpus_per_node: 8\n")
    recipe = write(tmp_path, "r.yaml", "defaults: base.yaml\ncluster:\n  num_nodes: 3\n")
    origins = read_config(recipe, ["logger.progress=false"]).origins
    assert origins["cluster.num_nodes"].endswith("r.yaml:3")
    assert origins["cluster.gpus_per_node"].endswith("base.yaml:3")
    assert origins["logger.progress"] == "command line"


def test_the_saved_configuration_loads_to_itself(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "r.yaml", ONLY_MODEL))
    saved = save_resolved(config, tmp_path / "run")
    assert saved == tmp_path / "run" / "config.yaml"
    assert "${" not in saved.read_text()
    assert load_config(saved) == config
