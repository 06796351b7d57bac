"""Reports of many ranks become one description, or an error that names parameter and ranks."""

from __future__ import annotations

import pytest

from refit_transport.layout import Holding, LayoutError, LogicalParameter, Region, describe, group_holdings

LEFT, RIGHT = Region((0,), (4,)), Region((4,), (8,))


def held(names: str, *regions: Region, shape: tuple[int, ...] = (8,), dtype: str = "bfloat16") -> Holding:
    return Holding(tuple(names), shape, dtype, regions)


def test_names_held_alike_share_one_layout() -> None:
    side = describe({0: [held("abc", LEFT)], 1: [held("ab", RIGHT), held("c", RIGHT)]})
    assert len(side.layouts) == 1
    assert [entry.name for entry in side.entries] == ["a", "b", "c"]
    assert side.layouts[0].regions_of(1) == (RIGHT,)


def test_replicas_are_joined_into_one_cell() -> None:
    side = describe({3: [held("a", LEFT)], 1: [held("a", LEFT)]})
    assert [cell.ranks for cell in side.layouts[0].cells] == [(1, 3)]


def test_a_name_needed_whole_here_and_in_parts_there_has_two_entries() -> None:
    side = describe({0: [held("a", LEFT)], 1: [Holding(("a",), (8,), "bfloat16", (), whole=True)]})
    assert [(entry.whole, side.layout_of(entry).ranks) for entry in side.entries] == [(False, (0,)), (True, (1,))]
    assert side.layout_of(side.entries[1]).regions_of(1) == (Region((0,), (8,)),)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (held("a", RIGHT, shape=(9,)), r"a: shape \(8,\) on rank 0, \(9,\) on rank 1"),
        (held("a", RIGHT, dtype="float32"), r"a: dtype bfloat16 on rank 0, float32 on rank 1"),
        (held("a", Region((7,), (9,))), r"a of shape \(8,\) on rank 1: region \[7:9\] lies outside"),
        (held("a", LEFT, Region((3,), (5,))), r"a .* on rank 1: regions \[0:4\] and \[3:5\] overlap in \[3:4\]"),
        (held("a", Region((0, 0), (1, 1))), r"on rank 1: region .* lies outside"),
    ],
)
def test_reports_that_contradict_are_refused(second: Holding, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe({0: [held("a", LEFT)], 1: [second]})


def test_a_name_reported_twice_and_a_dtype_nobody_can_move_are_refused() -> None:
    with pytest.raises(LayoutError, match="a: rank 0 reports it twice"):
        describe({0: [held("a", LEFT), held("ab", RIGHT)]})
    with pytest.raises(LayoutError, match="a on rank 0: dtype 'float4' cannot be moved"):
        describe({0: [held("a", LEFT, dtype="float4")]})


def test_one_ranks_holdings_are_grouped_by_everything_but_the_name() -> None:
    parameters = [LogicalParameter(name, (8,), "float32") for name in "abcd"]
    report = group_holdings(
        parameters, {"a": [LEFT], "b": [LEFT], "c": [RIGHT]}, frozenset("d"), dict.fromkeys("abcd", "bfloat16")
    )
    assert [(h.names, h.regions, h.whole, h.dtype) for h in report] == [
        (("a", "b"), (LEFT,), False, "bfloat16"),
        (("c",), (RIGHT,), False, "bfloat16"),
        (("d",), (), True, "bfloat16"),
    ]


def test_tens_of_thousands_of_names_on_hundreds_of_ranks_are_merged_by_group() -> None:
    """Each distinct group of names is walked once, however many ranks report it: 256 ranks x 40,000 names would take
    minutes name by name."""
    names = tuple(f"layers.{i}.up" for i in range(40_000))
    regions = [Region((i,), (i + 1,)) for i in range(256)]
    side = describe({rank: [Holding(names, (256,), "bfloat16", (regions[rank],))] for rank in range(256)})
    assert len(side.entries) == 40_000
    assert len(side.layouts) == 1
