"""Strided copies become exact boxes: writing through a landing equals the loader's own copy."""

from __future__ import annotations

import pytest
import torch

from refit_transport.engines.vllm.strided import Landing, Strided, contiguous_strides, landings, overlapping
from refit_transport.layout.region import Region

CASES = {
    "rows of a fused tensor": ((6, 4), (12, 4), lambda s: s, lambda d: d[6:]),
    "columns": ((4, 8), (4, 4), lambda s: s[:, 4:], lambda d: d),
    "an expert": ((4, 6), (3, 8, 6), lambda s: s, lambda d: d[1, 4:]),
    "transposed experts": ((2, 3, 8), (2, 4, 3), lambda s: s[:, :, 4:].transpose(1, 2), lambda d: d),
    "one dimension more": ((5,), (5, 1, 1), lambda s: s, lambda d: d.squeeze()),
    "one dimension less": ((6, 1, 4), (6, 4), lambda s: s.squeeze(1), lambda d: d),
    "a band": ((10, 4), (6, 4), lambda s: s[3:7], lambda d: d[1:5]),
    "flattened trailing dimensions": ((4, 3, 2, 2), (4, 12), lambda s: s.reshape(4, 12), lambda d: d),
    "flattened, then rows": ((4, 3, 2), (2, 6), lambda s: s.reshape(4, 6)[2:], lambda d: d),
    "every second row of the target": ((3, 4), (6, 4), lambda s: s, lambda d: d[1::2]),
    "two halves of the rows swapped": (
        (8, 3),
        (8, 3),
        lambda s: s.view(2, 4, 3),
        lambda d: d.view(2, 4, 3).as_strided((2, 4, 3), (3, 6, 1)),
    ),
    "a diagonal band": ((4, 6), (3, 3), lambda s: s.as_strided((3, 3), (7, 1)), lambda d: d),
    "a scalar": ((), (), lambda s: s, lambda d: d),
    "an element": ((4, 4), (), lambda s: s[2, 3], lambda d: d),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_writing_through_the_landings_equals_the_copy(case):
    source_shape, target_shape, take, put = case
    source = torch.arange(1, 1 + torch.Size(source_shape).numel(), dtype=torch.float32).view(source_shape)
    expected, written = torch.zeros(target_shape), torch.zeros(target_shape)
    put(expected).copy_(take(source))
    boxes = landings(Strided.of(take(source).squeeze()), Strided.of(put(expected).squeeze()), source_shape)
    for box in boxes:
        box.on(written, box.region).copy_(source[box.region.slices()])
    assert torch.equal(written, expected)
    assert sum(box.region.numel for box in boxes) == take(source).numel()
    assert overlapping([box.region for box in boxes]) is None


def test_part_of_a_landing_is_written_to_its_place():
    landing = Landing(Region((2, 0), (6, 4)), 8, (4, 1))
    target = torch.zeros(6, 4)
    landing.on(target, Region((3, 1), (5, 3))).fill_(1)
    assert target.nonzero().tolist() == [[3, 1], [3, 2], [4, 1], [4, 2]]


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda s: s[:1].expand(4, 6), id="a row repeated"),
        pytest.param(lambda s: s.reshape(-1)[2:20], id="a run that starts inside a row"),
    ],
)
def test_what_is_not_a_box_is_refused(take):
    source = torch.arange(24.0).view(4, 6)
    view = take(source)
    assert landings(Strided.of(view), Strided.of(torch.empty(view.shape)), (4, 6)) is None


def test_overlap_is_found_among_thousands_of_disjoint_boxes():
    boxes = [Region((i, 0), (i + 1, 8)) for i in range(5000)]
    assert overlapping(boxes) is None
    assert sorted(overlapping([*boxes, Region((4321, 7), (4322, 9))])) == [4321, 5000]


def test_contiguous_strides_are_those_of_torch():
    assert contiguous_strides((3, 4, 5)) == torch.empty(3, 4, 5).stride()
    assert contiguous_strides(()) == ()
