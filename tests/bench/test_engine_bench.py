"""``bench engine`` refits a real engine that has requests in flight, and its phases add up."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from refit_transport.bench.engine_requests import Requests
from refit_transport.bench.engine_trainers import rows_of
from tests.models import make_model, read_checkpoint

STEPS = ("pause", "update", "finish", "reset", "resume")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("bench") / "qwen3", 0)


def test_trainer_ranks_share_every_tensor_once(model):
    checkpoint = read_checkpoint(model)
    covered = dict.fromkeys(checkpoint, 0)
    for rank in range(3):
        for name, regions in rows_of(model, rank, 3).holdings().items():
            for region in regions:
                covered[name] += region.numel
                part = rows_of(model, rank, 3).view(name, region)
                assert part.equal(checkpoint[name][region.slices()])
    assert covered == {name: tensor.numel() for name, tensor in checkpoint.items()}


@pytest.mark.engine
def test_an_engine_with_requests_in_flight_is_refitted_and_goes_on(model, tmp_path):
    out = tmp_path / "engine.json"
    command = ["bench", "engine", "--model", str(model), "--rounds", "2", "--requests", "2", "--json", str(out)]
    ended = subprocess.run(
        [sys.executable, "-m", "refit_transport.cli", *command], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "2 refits" in ended.stdout
    figures = json.loads(out.read_text())
    assert figures["bytes"] == sum(tensor.nbytes for tensor in read_checkpoint(model).values())
    assert len(figures["refits"]) == 2
    for refit in figures["refits"]:
        assert sum(refit[step] for step in STEPS) == pytest.approx(refit["quiet"], abs=0.01)
        assert 0 < refit["transfer"] < refit["update"]


class SilentEngine:
    async def generate(self, prompt, sampling, name):
        await asyncio.Event().wait()
        yield


@pytest.mark.engine
def test_an_engine_that_puts_out_nothing_is_an_error_at_the_deadline():
    async def use() -> None:
        async with Requests(SilentEngine(), 3, 8, timeout_seconds=0.05):
            raise AssertionError("no token came")

    with pytest.raises(TimeoutError, match=r"0 of 3 tokens within 0.05 s"):
        asyncio.run(asyncio.wait_for(use(), 60))
