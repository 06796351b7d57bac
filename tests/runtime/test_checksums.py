"""Sums of pieces: equal on host and device, different for every change that could happen on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from refit_transport.runtime.checksums import BLOCK, ByteSum, Checksums
from refit_transport.runtime.staging import Staging

sys.path.insert(0, str(Path(__file__).parent.parent / "wires"))
from refit_cases import Case, Tensor, bound_rank, columns, rows

SIZES = (1, 2, 7, 8, 9, 1000, BLOCK * 8 - 1, BLOCK * 8, BLOCK * 8 + 1, BLOCK * 24 + 5)


def random_bytes(count: int, offset: int = 0) -> torch.Tensor:
    raw = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    padded = torch.zeros(count + offset, dtype=torch.uint8)
    padded[offset:] = torch.from_numpy(raw)
    return padded[offset:]


@pytest.mark.parametrize("count", [*SIZES, BLOCK * 8 * 129])
def test_host_and_device_arithmetic_agree_at_any_alignment(count: int) -> None:
    sums = ByteSum()
    expected = sums(random_bytes(count))
    for offset in (0, 1, 2, 4):
        data = random_bytes(count, offset)
        assert sums(data) == expected
        assert int(sums.on_device(data)) % (1 << 64) == expected


@pytest.mark.parametrize("count", SIZES)
def test_any_one_flipped_bit_changes_the_sum(count: int) -> None:
    sums, data = ByteSum(), random_bytes(count)
    before = sums(data)
    places = range(count) if count <= 1000 else (0, 1, count // 2, count - 2, count - 1)
    for at in places:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert sums(data) != before, f"byte {at}, bit {bit}"
            data[at] ^= 1 << bit
    assert sums(data) == before


def test_what_moves_or_is_missing_changes_the_sum() -> None:
    sums, data = ByteSum(), random_bytes(BLOCK * 24)
    before = sums(data)
    words, sign = data.view(torch.int64), torch.tensor(-(1 << 63))
    changes = {
        "words swapped": torch.cat([words[1:2], words[:1], words[2:]]),
        "blocks swapped": torch.cat([words[BLOCK : 2 * BLOCK], words[:BLOCK], words[2 * BLOCK :]]),
        "zeros": torch.zeros_like(words),
        "one byte later": data.roll(1).view(torch.int64),
        "all signs": words ^ sign,
        "two signs": torch.cat([words[:2] ^ sign, words[2:]]),
        "cut": words[:-1],
    }
    found = {name: sums(changed.contiguous().view(torch.uint8)) for name, changed in changes.items()}
    assert [name for name, value in found.items() if value == before] == []
    assert sums(torch.zeros(8, dtype=torch.uint8)) != sums(torch.zeros(16, dtype=torch.uint8))


def test_a_piece_that_a_wire_did_not_pack_here_is_an_error_not_a_pass() -> None:
    shape = (8, 8)
    case = Case((Tensor("w", shape, rows(shape, [0]), columns(shape, [1])),), ((0,), (1,)))
    sums = Checksums(bound_rank(case, case.plan(), 0)[3].program)
    sums.begin()
    with pytest.raises(RuntimeError, match=r"exchanged with rank 1 were not summed.*set verify: none"):
        sums.finish()


def test_sums_that_lie_on_a_device_count_as_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (64, 64)
    case = Case((Tensor("w", shape, rows(shape, [0]), columns(shape, [1])),), ((0,), (1,)))
    found = []
    for call in (ByteSum.__call__, ByteSum.on_device):
        monkeypatch.setattr(ByteSum, "__call__", call)
        trained, _, _, binding = bound_rank(case, case.plan(), 0)
        trained.fill(1)
        binding.checksums = Checksums(binding.program)
        binding.begin(1)
        binding.bind(Staging())
        for bucket in binding.buckets:
            bucket.pack.run()
        binding.checksums.finish()
        found.append(binding.checksums.sums)
    assert found[0].any() and np.array_equal(*found)
