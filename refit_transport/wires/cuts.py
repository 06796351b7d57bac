"""Where a message is cut, so that it can travel straight from and into several runs of memory at either end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def cut_points(segments: Sequence[torch.Tensor]) -> list[int]:
    """Byte offsets inside the message at which one run of memory ends and the next begins."""
    return list(accumulate(segment.numel() for segment in segments))[:-1]


def common_cuts(own: Sequence[int], peer: Sequence[int]) -> list[int]:
    return sorted({*own, *peer})


def cut(segments: Sequence[torch.Tensor], points: Sequence[int]) -> list[torch.Tensor]:
    """``segments`` (uint8, 1-D) cut further at ``points``, which contain the segments' own cuts. Empty parts are
    dropped."""
    parts: list[torch.Tensor] = []
    start = 0
    remaining = list(points)
    for segment in segments:
        stop, at = start + segment.numel(), start
        while remaining and remaining[0] <= stop:
            point = remaining.pop(0)
            if point > at:
                parts.append(segment[at - start : point - start])
                at = point
        if stop > at:
            parts.append(segment[at - start :])
        start = stop
    return parts
