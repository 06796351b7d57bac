"""The examples of docs/adapters.md are complete: they refit as they stand."""

from __future__ import annotations

import re

import pytest
import torch

from refit_transport.session.member import RefitMember
from tests.session.ranks import World, run_ranks


@pytest.fixture(scope="module")
def example(repository):
    """What the page's first two code blocks define."""
    source, sink, *_ = re.findall(r"```python\n(.*?)```", (repository / "docs/adapters.md").read_text(), re.S)
    names: dict = {}
    exec(source, names)
    exec(sink, names)
    return names


def test_the_pages_trainer_and_engine_refit(example):
    def value(name: str, version: int) -> torch.Tensor:
        return torch.arange(512 * 64, dtype=torch.float32).view(512, 64) * version + len(name)

    def body(world, rank, address):
        if rank < 2:
            source = example["RowSource"](rank, 2)
            member = RefitMember.join(address, rank=rank, role="trainer", source=source, timeout=60)
        else:
            sink = example["ColumnSink"](rank - 2)
            member = RefitMember.join(address, rank=rank, role="engine", sink=sink, timeout=60)
        wrong = []
        for version in (1, 2):
            if rank < 2:
                for name, tensor in source.tensors.items():
                    tensor.copy_(value(name, version)[source.region.slices()])
            member.refit(version, timeout=60)
            if rank >= 2:
                held = sink.tensors.items()
                wrong += [n for n, t in held if not torch.equal(t, value(n, version)[sink.region.slices()])]
                wrong += [] if sink.version == version else ["version"]
        member.leave()
        return wrong

    assert run_ranks(World(trainers=2, engines=2), body) == [[]] * 4
