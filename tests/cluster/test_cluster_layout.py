"""How ranks are split over the two sides, and what a session is told, from the configuration alone."""

import pytest

from refit_transport.cluster.data_parallel import PORTS, PORTS_PER_ENGINE, core_env, free_port
from refit_transport.cluster.engine_args import engine_args
from refit_transport.cluster.errors import ClusterError
from refit_transport.cluster.layout import ClusterLayout, cluster_layout, shares
from refit_transport.cluster.session_options import session_options
from refit_transport.config import load_config
from refit_transport.config.engine_shape import EngineShape, engine_cfgs

RECIPE = "recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml"


def tree(*overrides):
    return load_config(RECIPE, overrides)


VLLM = "policy.generation.vllm_cfg"
REPLICAS = "policy.generation.replicas"
RESOURCES = "policy.generation.colocated.resources"
TP1, TP2 = EngineShape(), EngineShape(tensor=2)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), ClusterLayout(2, (TP2,))),
        (("cluster.gpus_per_node=8", f"{RESOURCES}.gpus_per_node=4"), ClusterLayout(4, (TP2, TP2))),
        ((f"{VLLM}.tensor_parallel_size=1",), ClusterLayout(2, (TP1, TP1))),
        (
            ("cluster.num_nodes=3", f"{RESOURCES}.num_nodes=1", f"{RESOURCES}.gpus_per_node=null"),
            ClusterLayout(8, (TP2, TP2)),
        ),
        (
            (f"{VLLM}.tensor_parallel_size=1", f"{VLLM}.expert_parallel_size=2"),
            ClusterLayout(2, (EngineShape(expert=2),)),
        ),
        (
            ("cluster.gpus_per_node=9", f"{RESOURCES}.gpus_per_node=7",
             f"{REPLICAS}=[{{}}, {{tensor_parallel_size: 1}}, {{pipeline_parallel_size: 2}}]"),
            ClusterLayout(2, (TP2, TP1, EngineShape(2, 2))),
        ),
    ],
)  # fmt: skip
def test_ranks_of_both_sides_follow_the_configuration(overrides, expected):
    assert cluster_layout(tree(*overrides)) == expected


def test_joint_ranks_are_trainers_first_then_each_engine_core_after_core():
    layout = ClusterLayout(3, (EngineShape(tensor=2, pipeline=2), EngineShape(tensor=2, expert=4), TP1))
    assert [layout.rank_offset(replica) for replica in range(3)] == [3, 7, 11]
    assert layout.world_size == 12
    assert [core.name for core in layout.cores] == ["engine 0", "engine 1 core 0", "engine 1 core 1", "engine 2"]
    assert [core.shape.core_ranks for core in layout.cores] == [4, 2, 2, 1]


def test_an_engine_is_configured_by_its_item_of_the_list_and_else_as_all_are():
    generation = tree(
        f"{REPLICAS}=[{{tensor_parallel_size: 1, env_vars: {{A: b}}}}, {{gpu_memory_utilization: 0.5}}]"
    ).policy.generation
    first, second = engine_cfgs(generation, 3)
    assert (first["tensor_parallel_size"], first["env_vars"], first["gpu_memory_utilization"]) == (1, {"A": "b"}, 0.6)
    assert (second["tensor_parallel_size"], second["env_vars"], second["gpu_memory_utilization"]) == (2, {}, 0.5)


@pytest.mark.parametrize(
    "count, weights, lengths",
    [
        (5, (1, 1), [2, 3]),
        (6, (2, 1), [4, 2]),
        (1, (1, 1, 1), [0, 0, 1]),
        (0, (2, 1), [0, 0]),
        (9, (4, 4, 1), [4, 4, 1]),
    ],
)
def test_prompts_are_shared_out_in_order_by_ranks(count, weights, lengths):
    parts = shares(count, weights)
    assert [len(part) for part in parts] == lengths
    assert [index for part in parts for index in part] == list(range(count))


def test_cores_of_an_engine_meet_at_ports_that_are_free(monkeypatch):
    first = free_port()
    assert first in PORTS and first + PORTS_PER_ENGINE <= PORTS.stop
    assert core_env(1, 2, "10.0.0.1", first)["VLLM_DP_MASTER_PORT"] == str(first)
    monkeypatch.setattr("refit_transport.cluster.data_parallel.PORTS", range(7000, 7000))
    with pytest.raises(ClusterError, match="free ports"):
        free_port()


def test_engines_that_choose_ports_at_the_same_time_on_one_host_choose_others():
    firsts = {first: engine for engine in range(64) for first in {free_port(engine) for _ in range(3)}}
    taken = [port for first in firsts for port in range(first, first + PORTS_PER_ENGINE)]
    assert len(taken) == len(set(taken)) and set(firsts.values()) == set(range(64))


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.colocated.resources.gpus_per_node=4",
        "policy.generation.colocated.resources.gpus_per_node=null",
        f"{VLLM}.tensor_parallel_size=4",
        f"{REPLICAS}=[{{}}, {{}}]",
    ],
)
def test_a_side_without_ranks_is_refused_with_the_numbers(override):
    with pytest.raises(ValueError, match="cluster of 4 ranks: generation gets"):
        cluster_layout(tree(override))


def test_a_session_gets_the_options_of_the_selected_transport():
    options = session_options(tree("policy.generation.refit_cfg.nccl_reshard.scope=all"))
    assert (options["transport"], options["scope"]) == ("nccl_reshard", "all")
    plain = session_options(tree("policy.generation.refit_transport=null", "cluster.segment_size=2"))
    assert plain["transport"] == "gather_broadcast"
    assert plain["segment_size"] == 2
    assert "scope" not in plain


def test_free_vllm_arguments_win_over_derived_ones():
    config = tree("policy.generation.vllm_kwargs.seed=7")
    arguments = engine_args(config, config.policy.generation.vllm_cfg)
    assert arguments["seed"] == 7
    assert arguments["distributed_executor_backend"] == "mp"
    assert arguments["weight_transfer_config"] == {"backend": "nccl_reshard"}


def test_the_sizes_of_an_engine_are_those_of_its_own_configuration():
    config = tree(f"{REPLICAS}=[{{}}, {{tensor_parallel_size: 1, expert_parallel_size: 2}}]")
    first, second = (engine_args(config, cfg) for cfg in engine_cfgs(config.policy.generation, 4))
    assert (first["tensor_parallel_size"], first["enable_expert_parallel"]) == (2, False)
    assert (second["tensor_parallel_size"], second["enable_expert_parallel"]) == (1, True)
    assert "data_parallel_size" not in second  # which LLM refuses: cores find each other by environment
    assert second["distributed_executor_backend"] == "uni"
