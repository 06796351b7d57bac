"""What cannot be delivered completely and exactly once is refused, with names."""

from __future__ import annotations

import pytest

from refit_transport.layout import Layout, LogicalParameter, Region, Replicate, Shard, region_layout
from refit_transport.planning import PlanError, PlanOptions, plan_refit
from refit_transport.planning.groups import wire_dtype
from tests.planning.sides import on_mesh, planned, side

WHOLE = on_mesh((8, 4), [0], [Replicate()])
NEED = on_mesh((8, 4), [1], [Replicate()])
DOMAINS = [[0], [1]]


def test_a_gap_names_parameter_region_and_rank() -> None:
    held = region_layout((8, 4), {0: [Region((0, 0), (5, 4)), Region((6, 0), (8, 4))]})
    with pytest.raises(PlanError, match=r"layers\.3\.up: no trainer holds \[5:6, 0:4\], which rank 1 needs"):
        planned({"layers.3.up": held}, {"layers.3.up": NEED}, DOMAINS)


def test_a_rank_that_would_receive_a_part_twice_is_named() -> None:
    cells = [*on_mesh((8, 4), [1], [Replicate()]).cells, *region_layout((8, 4), {1: [Region((2, 0), (3, 4))]}).cells]
    with pytest.raises(PlanError, match=r"up: rank 1 receives part of .* twice"):
        planned({"up": WHOLE}, {"up": Layout((8, 4), tuple(cells))}, DOMAINS)


def test_a_rank_with_a_direct_and_a_whole_entry_is_refused() -> None:
    direct, whole = side({"up": NEED}), side({"up": NEED}, whole=True)
    both = type(direct)(direct.layouts, direct.entries + whole.entries)
    with pytest.raises(PlanError, match="up: inference rank 1 has two entries"):
        plan_refit(side({"up": WHOLE}), both, [LogicalParameter("up", (8, 4), "bfloat16")], DOMAINS)


def test_a_whole_tensor_that_is_wanted_in_parts_is_refused() -> None:
    parts = on_mesh((8, 4), [1, 2], [Shard(0)])
    with pytest.raises(PlanError, match=r"up: wanted whole, but rank 1 lists \[0:4, 0:4\]"):
        planned({"up": WHOLE}, {"up": parts}, [[0], [1], [2]], whole=True)


def test_a_name_that_no_trainer_holds_is_an_error_and_one_that_nobody_wants_is_reported() -> None:
    with pytest.raises(PlanError, match=r"inference ranks need b, c, which no trainer holds"):
        planned({"a": WHOLE}, {"a": NEED, "b": NEED, "c": NEED}, DOMAINS)
    assert planned({"a": WHOLE, "b": WHOLE}, {"a": NEED}, DOMAINS).unused == ("b",)


def test_shapes_that_disagree_are_refused_with_both() -> None:
    with pytest.raises(PlanError, match=r"up: shape \(8, 4\) on the trainers, \(8, 5\) on the inference ranks"):
        planned({"up": WHOLE}, {"up": on_mesh((8, 5), [1], [Replicate()])}, DOMAINS)


def test_a_rank_outside_all_domains_and_a_rank_in_two_are_refused() -> None:
    with pytest.raises(PlanError, match="inference rank 1 has weights but is in no domain"):
        planned({"up": WHOLE}, {"up": NEED}, [[0]])
    with pytest.raises(PlanError, match=r"exactly one domain.*\[1\]"):
        planned({"up": WHOLE}, {"up": NEED}, [[0, 1], [1]])


def test_a_row_larger_than_a_bucket_is_refused_with_the_option_to_raise() -> None:
    with pytest.raises(PlanError, match="more than the 6 bytes of half a bucket: raise bucket_bytes"):
        planned({"up": WHOLE}, {"up": NEED}, DOMAINS, PlanOptions(bucket_bytes=12))


@pytest.mark.parametrize("option", ["relay", "network_ports", "broadcast_root"])
def test_an_unknown_option_value_is_refused_with_the_allowed_ones(option: str) -> None:
    with pytest.raises(PlanError, match=f"{option} is 'sometimes'; allowed: "):
        planned({"up": WHOLE}, {"up": NEED}, DOMAINS, PlanOptions(**{option: "sometimes"}))


@pytest.mark.parametrize(
    ("source", "sink", "option", "wire"),
    [
        ("float32", "bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "auto", "bfloat16"),
        ("float32", "float32", "auto", "float32"),
        ("bfloat16", "float16", "auto", "float16"),
        ("float32", "bfloat16", "float32", "float32"),
        ("float32", "float32", "bfloat16", "float32"),
        ("float64", "float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32", "float32"),
        ("int64", "int64", "bfloat16", "int64"),
        ("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "float8_e4m3fn"),
    ],
)
def test_tensors_travel_in_the_smaller_dtype_and_lose_no_bits_that_both_sides_have(
    source: str, sink: str, option: str, wire: str
) -> None:
    assert wire_dtype("w", source, sink, option) == wire


@pytest.mark.parametrize(
    ("source", "sink"),
    [("int64", "int32"), ("bool", "uint8"), ("bfloat16", "float8_e4m3fn"), ("float8_e5m2", "float32")],
)
def test_only_floating_dtypes_are_converted(source: str, sink: str) -> None:
    with pytest.raises(PlanError, match=f"w: trainers hold {source}, inference ranks need {sink}"):
        planned({"w": WHOLE}, {"w": NEED}, DOMAINS, dtypes=(source, sink))


def test_an_unsharded_negative_dimension_is_the_same_as_its_positive_form() -> None:
    assert on_mesh((8, 4), [0, 1], [Shard(-1)]) == on_mesh((8, 4), [0, 1], [Shard(1)])
