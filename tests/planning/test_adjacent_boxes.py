"""A rank that holds boxes side by side stores them apart: no transfer reaches across their border."""

from __future__ import annotations

from refit_transport.layout import Cell, Layout, Region
from tests.planning.sides import planned

PARTS = Layout((8, 4), (Cell(Region((0, 0), (4, 4)), (0,)), Cell(Region((4, 0), (8, 4)), (0,))))
WHOLE = Layout((8, 4), (Cell(Region((0, 0), (8, 4)), (1,)),))


def rows(plan) -> list[tuple[int, int]]:
    return sorted((t.region.start[0], t.region.stop[0]) for group in plan.groups for t in group.transfers)


def test_boxes_of_the_source_are_not_joined():
    assert rows(planned({"w": PARTS}, {"w": WHOLE}, [(0,), (1,)])) == [(0, 4), (4, 8)]


def test_boxes_of_the_destination_are_not_joined():
    holder = Layout((8, 4), (Cell(Region((0, 0), (8, 4)), (1,)),))
    assert rows(planned({"w": holder}, {"w": PARTS}, [(0,), (1,)])) == [(0, 4), (4, 8)]
