"""How ranks are split over the two sides, and what a session is told, from the configuration alone."""

import pytest

from refit_transport.cluster.engine_args import engine_args
from refit_transport.cluster.layout import ClusterLayout, cluster_layout
from refit_transport.cluster.session_options import session_options
from refit_transport.config import load_config

RECIPE = "recipes/grpo-reverse-digits-1n4r-fsdp2-tp2.yaml"


def tree(*overrides):
    return load_config(RECIPE, overrides)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), ClusterLayout(2, 1, 2)),
        (("cluster.gpus_per_node=8", "policy.generation.colocated.resources.gpus_per_node=4"), ClusterLayout(4, 2, 2)),
        (("policy.generation.vllm_cfg.tensor_parallel_size=1",), ClusterLayout(2, 2, 1)),
        (
            ("cluster.num_nodes=3", "policy.generation.colocated.resources.num_nodes=1",
             "policy.generation.colocated.resources.gpus_per_node=null"),
            ClusterLayout(8, 2, 2),
        ),
    ],
)  # fmt: skip
def test_ranks_of_both_sides_follow_the_configuration(overrides, expected):
    assert cluster_layout(tree(*overrides)) == expected


def test_joint_ranks_are_trainers_first_then_each_replica():
    layout = ClusterLayout(3, 2, 4)
    assert [layout.rank_offset(r) for r in range(2)] == [3, 7]
    assert layout.world_size == 11


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.colocated.resources.gpus_per_node=4",
        "policy.generation.colocated.resources.gpus_per_node=null",
        "policy.generation.vllm_cfg.tensor_parallel_size=4",
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
    arguments = engine_args(tree("+policy.generation.vllm_kwargs.seed=7".lstrip("+")))
    assert arguments["seed"] == 7
    assert arguments["distributed_executor_backend"] == "mp"
    assert arguments["weight_transfer_config"] == {"backend": "nccl_reshard"}
