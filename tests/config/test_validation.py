"""Every mistake is one line, all of them at once, before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from refit_transport.config import Cluster, InvalidConfigError, Violation, load_valid, read_config, validate
from refit_transport.config.model_facts import ModelFacts

RECIPES = sorted(path.name for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))
BASE = "recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml"
GENERATION = "policy.generation"
RESHARD = f"{GENERATION}.refit_cfg.nccl_reshard"
VLLM = f"{GENERATION}.vllm_cfg"
REPLICAS = f"{GENERATION}.replicas"


@pytest.fixture(autouse=True)
def _in_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)


def violations(*overrides: str, recipe: str = BASE, cluster: Cluster | None = None) -> list[Violation]:
    loaded = read_config(recipe, overrides)
    return validate(loaded.config, cluster, loaded.origins)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_valid(recipe: str) -> None:
    assert violations(recipe=f"recipes/{recipe}") == []


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        # Names.
        (["policy.precission=float32"], "policy.precission", "did you mean policy.precision?"),
        (["polcy.precision=float32"], "polcy", "did you mean policy?"),
        (
            ["policy.generation.tensor_parallel_size=2"],
            f"{GENERATION}.tensor_parallel_size",
            f"mean {VLLM}.tensor_para",
        ),
        (
            ["grpo.adv_estimator.normalise_rewards=1"],
            "grpo.adv_estimator.normalise_rewards",
            "did you mean grpo.adv_estimator.norm",
        ),
        (["zebra=1"], "zebra", "no such key"),
        # Types and values.
        (["grpo.max_num_steps=many"], "grpo.max_num_steps", "integer >= 0"),
        (["grpo.max_num_steps=1.5"], "grpo.max_num_steps", "integer >= 0"),
        (["policy.train_micro_batch_size=true"], "policy.train_micro_batch_size", "integer >= 1"),
        (["grpo.normalize_rewards=1"], "grpo.normalize_rewards", "true, false"),
        (["policy.precision=float8"], "policy.precision", "bfloat16, float32, float16"),
        (["policy.precision=null"], "policy.precision", "bfloat16, float32, float16"),
        (["policy.model_name=null"], "policy.model_name", "required"),
        (["policy=3"], "policy", "mapping"),
        (["policy.generation.vllm_cfg=tp2"], VLLM, "mapping"),
        ([f"{GENERATION}.backend=sglang"], f"{GENERATION}.backend", "vllm"),
        ([f"{RESHARD}.scope=experts"], f"{RESHARD}.scope", "ffn, all"),
        ([f"{RESHARD}.bucket_bytes=1"], f"{RESHARD}.bucket_bytes", "integer >= 4096"),
        ([f"{RESHARD}.timeout_s=0"], f"{RESHARD}.timeout_s", "number > 0"),
        ([f"{GENERATION}.top_p=1.5"], f"{GENERATION}.top_p", "number > 0 and <= 1"),
        (["loss_fn.ratio_clip_c=0.5"], "loss_fn.ratio_clip_c", "number > 1 or null"),
        # Keys of other frameworks.
        (["policy.sequence_packing.enabled=true"], "policy.sequence_packing", "not supported"),
        (["policy.dtensor_cfg.context_parallel_size=2"], "policy.dtensor_cfg.context_parallel_size", "not supported"),
        (["ppo.async_ppo.enabled=true"], "ppo.async_ppo", "not supported"),
        (["logger.wandb_enabled=true"], "logger.wandb_enabled", "not supported"),
        # Combinations.
        (["grpo.async_grpo.enabled=true"], "grpo.async_grpo.enabled", "use_importance_sampling_correction: true"),
        ([f"{GENERATION}.colocated.enabled=true"], f"{GENERATION}.colocated.enabled", "false"),
        ([f"{GENERATION}.refit_transport=m2n"], f"{GENERATION}.refit_transport", "nccl_reshard"),
        ([f"{GENERATION}.refit_transport=no_module:X"], f"{GENERATION}.refit_transport", "No module named 'no_module'"),
        ([f"{RESHARD}.wire=nccl"], f"{RESHARD}.wire", "auto, tcp or gloo"),
        ([f"{RESHARD}.domains=segment"], f"{RESHARD}.domains", "cluster.segment_size"),
        (["policy.megatron_cfg.enabled=true"], "policy.dtensor_cfg.enabled", "false"),
        (["policy.dtensor_cfg.enabled=false"], "policy.dtensor_cfg.enabled", "true"),
        (["ppo={}"], "grpo", "exactly one section of grpo, ppo"),
        # Layouts.
        (
            [f"{VLLM}.tensor_parallel_size=3"],
            f"{VLLM}.tensor_parallel_size",
            "a divisor of the model's 4 attention heads",
        ),
        (
            [f"{VLLM}.expert_parallel_size=3"],
            f"{VLLM}.expert_parallel_size",
            "1, or a multiple of the tensor-parallel size 2",
        ),
        ([f"{VLLM}.expert_parallel_size=2"], f"{VLLM}.expert_parallel_size", "has no experts"),
        ([f"{VLLM}.pipeline_parallel_size=2"], f"{VLLM}.tensor_parallel_size", "divide the 2 that generate"),
        ([f"{REPLICAS}=[]"], REPLICAS, "one item or more, or null"),
        ([f"{REPLICAS}=[2, 1]"], REPLICAS, "a mapping as item 0"),
        ([f"{REPLICAS}=[{{tp: 2}}]"], REPLICAS, "tensor_parallel_size, pipeline_parallel_size, expert_parallel_size"),
        ([f"{REPLICAS}=[{{}}, {{tensor_parallel_size: 0}}]"], REPLICAS, "in item 1: integer >= 1"),
        ([f"{REPLICAS}=[{{}}, {{tensor_parallel_size: 1}}]"], REPLICAS, "engines of 2 ranks in all, not 2 + 1"),
        (
            [f"{REPLICAS}=[{{tensor_parallel_size: 3}}]"],
            f"{REPLICAS}[0].tensor_parallel_size",
            "a divisor of the model's 4 attention heads",
        ),
        ([f"{REPLICAS}=[{{expert_parallel_size: 4}}]"], f"{REPLICAS}[0].expert_parallel_size", "has no experts"),
        ([f"{GENERATION}.vllm_kwargs.data_parallel_size=2"], f"{GENERATION}.vllm_kwargs", f"set {VLLM}"),
        ([f"{GENERATION}.vllm_kwargs.prefill_context_parallel_size=2"], f"{GENERATION}.vllm_kwargs", f"set {VLLM}"),
        (
            [f"{GENERATION}.vllm_kwargs.worker_extension_cls=a.B"],
            f"{GENERATION}.vllm_kwargs",
            "worker_extension_cls",
        ),
        ([f"{VLLM}.env_vars={{THREADS: 2}}"], f"{VLLM}.env_vars", "mapping of strings"),
        ([f"{REPLICAS}=[{{env_vars: {{THREADS: 2}}}}]"], REPLICAS, "env_vars in item 0: mapping of strings"),
        (
            ["policy.dtensor_cfg.dp_replicate_size=3"],
            "policy.dtensor_cfg.tensor_parallel_size",
            "the 2 ranks that train",
        ),
        (
            ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.expert_parallel_size=3"],
            "policy.dtensor_cfg.expert_parallel_size",
            "a multiple of policy.dtensor_cfg.tensor_parallel_size",
        ),
        (
            ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.lora_cfg.enabled=true"],
            "policy.dtensor_cfg.lora_cfg.enabled",
            "false with policy.dtensor_cfg.tensor_parallel_size above 1",
        ),
        (["cluster.gpus_per_node=2"], f"{GENERATION}.colocated.resources.gpus_per_node", "leaves 0 of 2 to train"),
        (
            [f"{GENERATION}.colocated.resources.gpus_per_node=null"],
            f"{GENERATION}.colocated.resources.gpus_per_node",
            "how much of the cluster's 4 ranks generates",
        ),
        # Batches and loss.
        (["policy.train_global_batch_size=96"], "policy.train_global_batch_size", "256 answers"),
        (["policy.train_micro_batch_size=24"], "policy.train_global_batch_size", "a multiple of 48"),
        ([f"{VLLM}.max_model_len=8"], f"{VLLM}.max_model_len", "at least"),
        (
            ["loss_fn.sequence_level_importance_ratios=true"],
            "loss_fn.sequence_level_importance_ratios",
            "token_level_loss",
        ),
        (["loss_fn.truncated_importance_sampling_type=tis"], "loss_fn.truncated_importance_sampling_ratio", "above 0"),
        (["loss_fn.use_kl_in_reward=true"], "loss_fn.use_kl_in_reward", "reinforce_plus_plus"),
        (["grpo.stop_at_validation_metric=accuracy"], "grpo.stop_at_validation_threshold", "set"),
        # Data.
        (["data.dataset_name=jsonl"], "data.train_path", "a JSONL file"),
        (["data.val_path=/no/such.jsonl"], "data.val_path", "an existing JSONL file"),
        (["env.reward=nosuchmodule:reward"], "env.reward", "module:function"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(overrides: list[str], key: str, allowed: str) -> None:
    found = {violation.key: violation for violation in violations(*overrides)}
    assert key in found
    assert allowed in found[key].allowed
    assert found[key].anchor.startswith("docs/configuration.md#") or "no such key" in found[key].allowed


LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        ({"model_type": "llama"}, ""),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 32.0, **LLAMA_3}}, ""),
        ({"model_type": "deepseek_v3", "rope_theta": 10000, "rope_scaling": YARN}, ""),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias: true"),
        ({"model_type": "qwen3", "rope_scaling": YARN}, "rope_type: yarn"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", **LLAMA_3, "low_freq_factor": 2}},
            "rope_type: llama3 with parameters of its own",
        ),
        (
            {"model_type": "deepseek_v3", "rope_scaling": YARN | {"mscale": None}},
            "rope_type: yarn with parameters of its own",
        ),
    ],
)
def test_what_megatron_does_not_build_is_known_from_the_configuration(config: dict[str, object], obstacle: str) -> None:
    assert ModelFacts.from_config(config).megatron_obstacle == obstacle


def test_a_model_that_megatron_does_not_build_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "mlp_bias": True}))
    overrides = [
        f"policy.model_name={tmp_path}",
        "policy.dtensor_cfg.enabled=false",
        "policy.megatron_cfg.enabled=true",
    ]
    assert violations(*overrides) == []
    with pytest.raises(InvalidConfigError, match=r"policy\.megatron_cfg\.enabled: .*false for this model"):
        load_valid(BASE, overrides, algorithm="grpo")


def test_a_critic_is_cut_by_sizes_of_its_own() -> None:
    recipe = "recipes/ppo-reverse-digits-1n4r-fsdp2-tp2.yaml"
    megatron = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
    pipeline = (*megatron, "policy.megatron_cfg.pipeline_model_parallel_size=2", "value.train_global_batch_size=32")
    (found,) = violations(*pipeline, recipe=recipe)
    assert (found.key, found.allowed) == (
        "value.train_global_batch_size",
        "a multiple of 64 (train_micro_batch_size 32 x 2 data-parallel ranks)",
    )
    (found,) = violations(*megatron, "value.dtensor_cfg.tensor_parallel_size=3", recipe=recipe)
    assert found.key == "value.dtensor_cfg.tensor_parallel_size" and "the 2 ranks that train" in found.allowed


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("expert_parallel_size=2", "1, since the model has no experts"),
        ("tensor_parallel_size=8", "a divisor of the model's 4 attention heads"),
        ("enabled=false", "true"),
    ],
)
def test_a_critic_whose_cut_does_not_fit_is_refused_by_its_own_key(override: str, allowed: str) -> None:
    recipe = "recipes/ppo-reverse-digits-1n4r-fsdp2-tp2.yaml"
    found = {v.key: v.allowed for v in violations(f"value.dtensor_cfg.{override}", recipe=recipe)}
    key = f"value.dtensor_cfg.{override.partition('=')[0]}"
    assert list(found) == [key] and allowed in found[key]


def test_a_critic_of_the_policys_checkpoint_needs_the_policys_changes_to_its_configuration() -> None:
    recipe = "recipes/ppo-reverse-digits-1n4r-fsdp2-tp2.yaml"
    changes = "policy.hf_config_overrides={rope_theta: 5.0}"
    (found,) = violations(changes, recipe=recipe)
    assert (found.key, found.allowed) == (
        "value.hf_config_overrides",
        "{rope_theta: 5}, as policy.hf_config_overrides, or a value.model_name of its own",
    )
    assert violations(changes, "value.hf_config_overrides={rope_theta: 5.0}", recipe=recipe) == []


LAYOUT = "policy.megatron_cfg.pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("layout", "stages", "overrides", "allowed"),
    [
        ("Et|t|t|tttL", 2, [], ""),
        ("E,t*2|(t|)*2,ttL", 2, [], ""),
        ("(Et|)*1,(t|)*4,tL", 3, [], ""),
        ("Et|tttttL", 4, [], "a multiple of 4 stages, not 2"),
        ("Ettt|tttL", 1, [], "1 stage, not 2"),
        ("Ett|ttL", 2, [], "6 decoder layers (t), not 4"),
        ("Etx|tttttL", 2, [], "letters E, t, m, L"),
        ("tt|ttttL", 2, [], "E first and L last"),
        ("Ett|ttttmL", 2, [], "0 prediction layers (m), not 1"),
        ("Et|t|t|tttL", 2, ["policy.megatron_cfg.virtual_pipeline_model_parallel_size=3"], "6 stages, not 4"),
    ],
)
def test_a_pipeline_layout_fits_the_stages_and_the_model(
    tmp_path: Path, layout: str, stages: int, overrides: list[str], allowed: str
) -> None:
    sizes = (f"{LAYOUT}='{layout}'", f"policy.megatron_cfg.pipeline_model_parallel_size={stages}")
    found = sized(tmp_path, MOE, *MEGATRON, *sizes, *overrides, ranks=20, generate=8)
    assert set(found) == ({LAYOUT} if allowed else set())
    assert allowed in found.get(LAYOUT, "")


def test_a_list_of_engines_that_cannot_be_read_is_one_line() -> None:
    found = violations(f"{GENERATION}.colocated.resources.gpus_per_node=3", f"{REPLICAS}=[{{tp: 2}}, {{}}]")
    assert [violation.key for violation in found] == [REPLICAS]


def test_five_mistakes_are_five_lines_with_where_they_were_made() -> None:
    found = violations(
        f"{GENERATION}.refit_transport=nccl_reshrad",
        f"{GENERATION}.colocated.enabled=true",
        "policy.precission=float32",
        f"{VLLM}.tensor_parallel_size=3",
        "policy.train_global_batch_size=60",
    )
    lines = [str(violation) for violation in found]
    assert len(lines) == 5
    assert all("\n" not in line and "(command line)" in line and "see docs/configuration.md#" in line for line in lines)


@pytest.mark.parametrize(
    "inert", ["policy.sequence_packing.enabled=false", "logger.wandb_enabled=false", "policy.draft=null", "async_rl={}"]
)
def test_foreign_keys_that_are_switched_off_are_ignored(inert: str) -> None:
    assert violations(inert) == []


def test_more_ranks_than_the_cluster_has() -> None:
    found = violations(cluster=Cluster(nodes=1, gpus_per_node=2))
    assert [(v.key, v.found) for v in found] == [("cluster.gpus_per_node", 4)]
    assert "at most 2" in found[0].allowed


MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 999,
    "moe_intermediate_size": 48,
    "num_experts": 5,
}
MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "cluster.device=cuda")


def sized(tmp_path: Path, config: dict, *overrides: str, ranks: int = 8, generate: int = 4) -> dict[str, str]:
    """Layout violations of a model with ``config``, which has ``ranks`` ranks of which some generate."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    resources = f"{GENERATION}.colocated.resources.gpus_per_node={generate}"
    named = [
        f"policy.model_name={tmp_path}",
        f"cluster.gpus_per_node={ranks}",
        resources,
        f"{VLLM}.tensor_parallel_size=1",
    ]
    return {v.key: v.allowed for v in violations(*named, *overrides) if v.anchor.endswith("#layouts")}


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        ([], None, ""),  # the dense width of a model whose every layer has experts does not matter
        ([f"{VLLM}.tensor_parallel_size=4"], None, ""),  # two key-value heads are replicated over four ranks
        (["policy.dtensor_cfg.tensor_parallel_size=4"], "policy.dtensor_cfg.tensor_parallel_size", "2 key-value heads"),
        (
            ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.expert_parallel_size=2"],
            "policy.dtensor_cfg.expert_parallel_size",
            "5 experts",
        ),
        (
            [f"{VLLM}.tensor_parallel_size=4", f"{VLLM}.expert_parallel_size=4"],
            None,
            "",
        ),  # experts may be spread unevenly
        ([f"{VLLM}.tensor_parallel_size=2", f"{VLLM}.expert_parallel_size=4"], None, ""),  # over data-parallel cores
        ([*MEGATRON, "policy.megatron_cfg.tensor_model_parallel_size=4"], None, ""),
        (
            [*MEGATRON, "policy.megatron_cfg.pipeline_model_parallel_size=4"],
            "policy.megatron_cfg.pipeline_model_parallel_size",
            "4 equal stages or chunks have to divide 6 layers",
        ),
        (
            [
                *MEGATRON,
                "policy.megatron_cfg.pipeline_model_parallel_size=4",
                "policy.megatron_cfg.num_layers_in_first_pipeline_stage=1",
                "policy.megatron_cfg.num_layers_in_last_pipeline_stage=1",
            ],
            None,
            "",
        ),
        (
            [*MEGATRON, "policy.megatron_cfg.expert_model_parallel_size=4"],
            "policy.megatron_cfg.expert_model_parallel_size",
            "5 experts",
        ),
        (
            [*MEGATRON, "policy.megatron_cfg.expert_model_parallel_size=3"],
            "policy.megatron_cfg.expert_model_parallel_size",
            "the 4 ranks that train",
        ),
    ],
)
def test_sizes_are_those_of_the_model(tmp_path: Path, overrides: list[str], key: str | None, allowed: str) -> None:
    found = sized(tmp_path, MOE, *overrides)
    assert set(found) == ({key} if key else set())
    assert allowed in found.get(key, "")


def test_whole_nodes_are_given_to_generation_on_several_nodes() -> None:
    overrides = ("cluster.num_nodes=3", f"{GENERATION}.colocated.resources.gpus_per_node=null")
    found = violations(*overrides, "policy.train_micro_batch_size=8")
    assert [v.key for v in found] == [f"{GENERATION}.colocated.resources.num_nodes"]
    assert (
        violations(*overrides, "policy.train_micro_batch_size=8", f"{GENERATION}.colocated.resources.num_nodes=1") == []
    )


def test_validation_imports_nothing_heavy_and_takes_less_than_two_seconds(repository: Path) -> None:
    script = (
        "import sys, time; from refit_transport.config import read_config, validate\n"
        f"loaded = read_config({BASE!r}, ['policy.generation.vllm_cfg.tensor_parallel_size=3'])\n"
        "assert validate(loaded.config)\n"
        "print(','.join(sorted({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules))))\n"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=True)
    heavy, seconds = done.stdout.splitlines()
    assert heavy == ""
    assert float(seconds) < 2  # of the processor, since other processes share this machine
