"""A benchmark run, gated: contents, bytes, balance and memory exactly, time loosely."""

import json
import os
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from refit_transport.bench import refit
from refit_transport.bench.config import load
from refit_transport.bench.netlab import NAMESPACES, PREFIX, supported
from refit_transport.bench.refit import ContentError, measure
from refit_transport.bench.results import summarise
from refit_transport.cli import main

FIGURES = {
    "seconds_median", "seconds_all", "bytes_network", "bytes_network_minimum", "bound_seconds", "share_of_bound",
    "busiest_nic_over_mean", "peak_extra_bytes", "predicted_seconds", "gb_per_second",
}  # fmt: skip
"""What every transport reports."""

ROWS_TO_COLUMNS = """
title: rows to columns
cluster: {nic: rank, rate: 1gbit, domains: [[0, 1, 2, 3], [4, 5, 6, 7]]}
trainers: {mesh: {fsdp: 4}}
engines: {mesh: {dp: 2, tp: 2}}
tensors:
  - {name: "layers.{layer}.down", repeat: {layer: 8}, shape: [1024, 4096], trainers: {fsdp: 0}, engines: {tp: 1}}
transports: [nccl_reshard]
bucket_bytes: 4194304
rounds: 3
"""

MIXED = """
title: experts, odd sizes and small tensors over three nodes
cluster: {nic: node, rate: 1gbit, domains: [[0, 1], [2, 3], [4, 5]]}
trainers: {mesh: {ep: 2}}
engines: {mesh: {dp: 2, tp: 2}}
tensors:
  - name: layers.{layer}.experts.{expert}.up
    repeat: {layer: 4, expert: 8}
    shape: [511, 1021]
    trainers: {ep: expert}
    engines: {tp: 0}
  - {name: "layers.{layer}.down", repeat: {layer: 4}, shape: [1021, 513], trainers: {ep: 1}, engines: {tp: 1}}
  - {name: "layers.{layer}.norm", repeat: {layer: 64}, shape: [129], dtype: float32, trainers: {ep: 0}}
transports: [nccl_reshard]
bucket_bytes: 4194304
rounds: 3
"""

ONE_HOST = """
title: one host
cluster: {domains: [[0, 1, 2, 3]]}
trainers: {mesh: {fsdp: 2}}
engines: {mesh: {tp: 2}}
tensors:
  - {name: "layers.{layer}.up", repeat: {layer: 3}, shape: [65, 33], trainers: {fsdp: 0}, engines: {tp: 0}}
  - {name: "layers.{layer}.down", repeat: {layer: 3}, shape: [33, 66], trainers: {fsdp: 1}, engines: {tp: 1}}
  - {name: norm, shape: [7], dtype: float32, engine_dtype: bfloat16, trainers: {fsdp: 0}}
transports: [nccl_reshard, gather_broadcast, gather_broadcast_every, parameter_loop, stream]
bucket_bytes: 65536
rounds: 1
"""


def config_file(folder: Path, text: str) -> Path:
    path = folder / "case.yaml"
    path.write_text(text)
    return path


def run_emulated(folder: Path, text: str) -> dict:
    if reason := supported():
        pytest.skip(reason)
    return summarise(measure(load(config_file(folder, text)), emulate=True))


@pytest.mark.netns
@pytest.mark.parametrize("text", [ROWS_TO_COLUMNS, MIXED], ids=["a card per rank", "a card per node"])
def test_an_emulated_refit_moves_the_minimum_in_balance_in_two_buckets_near_the_bound(tmp_path, text):
    summary = run_emulated(tmp_path, text)
    ours = summary["transports"]["nccl_reshard"]
    assert 1 - 1e-3 <= ours["bytes_over_minimum"] <= 1 + 1e-3
    if summary["config"]["cluster"]["nic"] == "rank":
        assert ours["busiest_nic_over_fair_share"] <= 1.01
        assert ours["busiest_nic_over_mean"] <= 1.01
    assert ours["staged_bytes"] <= 2 * 4194304 * 1.05
    assert ours["packets_dropped"] == 0
    assert 0.80 <= ours["share_of_bound"] <= 1.0, ours


@pytest.mark.netns
def test_a_single_root_is_counted_as_the_bottleneck_it_is(tmp_path):
    text = ROWS_TO_COLUMNS.replace("rounds: 3", "rounds: 1").replace(
        "[nccl_reshard]", "[nccl_reshard, gather_broadcast]"
    )
    summary = run_emulated(tmp_path, text)
    theirs = summary["transports"]["gather_broadcast"]
    assert theirs["bytes_over_minimum"] == pytest.approx(1.0, rel=1e-3), "the opponent crosses once as well"
    assert theirs["busiest_nic_over_mean"] == pytest.approx(4.0, rel=0.01)
    assert summary["ratios"]["gather_broadcast/nccl_reshard"] > 2.5


def test_every_transport_runs_on_one_host_and_the_files_hold_their_figures(tmp_path, capsys):
    out, plot = tmp_path / "figures" / "out.json", tmp_path / "figures" / "out.png"
    arguments = ["bench", "refit", "--config", str(config_file(tmp_path, ONE_HOST)), "--rounds", "2"]
    assert main([*arguments, "--json", str(out), "--plot", str(plot)]) == 0
    summary = json.loads(out.read_text())
    assert tuple(summary["transports"]) == load(tmp_path / "case.yaml").transports
    for name, figures in summary["transports"].items():
        assert figures.keys() >= FIGURES, name
        assert len(figures["seconds_all"]) == 2
        assert figures["seconds_median"] > 0
    assert summary["transports"]["nccl_reshard"]["bytes_network"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "nccl_reshard" in printed
    assert "plain two-process stream" in printed


def test_our_transports_run_over_gloo_as_well(tmp_path):
    config = load(config_file(tmp_path, ONE_HOST), ["wire=gloo", "transports=[nccl_reshard,gather_broadcast]"])
    figures = summarise(measure(config, emulate=False))["transports"]
    assert all(figures[name]["seconds_median"] > 0 for name in config.transports)


@pytest.mark.slow
def test_a_checkpoint_in_a_folder_is_a_refit_too(tmp_path):
    text = ONE_HOST.replace(
        "[nccl_reshard, gather_broadcast, gather_broadcast_every, parameter_loop, stream]", "[checkpoint]"
    )
    summary = summarise(
        measure(load(config_file(tmp_path, text.replace(", engine_dtype: bfloat16", ""))), emulate=False)
    )
    assert summary["transports"]["checkpoint"]["seconds_median"] > 0


def test_wrong_contents_end_the_run_with_transport_rank_and_tensor(tmp_path, monkeypatch):
    from refit_transport.bench.methods import parameter_loop

    monkeypatch.setattr(parameter_loop.ParameterLoop, "run", lambda self, version: {})
    config = load(config_file(tmp_path, ONE_HOST), ["transports=[parameter_loop]"])
    with pytest.raises(ContentError, match=r"parameter_loop, refit 1: 2 ranks .* rank 2 .* layers\.0\.up"):
        measure(config, emulate=False)


def test_a_missed_target_fails_the_run_only_when_asked(tmp_path):
    path = config_file(tmp_path, ONE_HOST + "targets: {max_seconds_median: 0.0}\n")
    arguments = ["bench", "refit", "--config", str(path), "transports=[parameter_loop]"]
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 1


def test_emulation_that_cannot_be_had_is_refused_with_the_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(refit, "supported", lambda: "an emulated network needs root")
    assert main(["bench", "refit", "--config", str(config_file(tmp_path, ONE_HOST)), "--emulate"]) == 1
    assert "--emulate: an emulated network needs root" in capsys.readouterr().err


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupted", "terminated"])
def test_a_run_that_is_stopped_leaves_no_namespace_and_no_rank(tmp_path, number):
    path = config_file(tmp_path, ROWS_TO_COLUMNS.replace("rounds: 3", "rounds: 1000"))
    read, write = os.pipe()
    child = get_context("fork").Process(target=_bench_in_a_group_of_its_own, args=(path, write))
    child.start()
    os.close(write)
    with open(read) as said:
        while "round 1" not in (line := said.readline()):
            assert line, "the run ended before its first round"
        os.kill(child.pid, number)
    child.join(30)
    assert child.exitcode not in (None, 0)
    assert not list(NAMESPACES.glob(f"{PREFIX}{child.pid}-*"))
    _wait_for_the_end_of_group(child.pid)


def _bench_in_a_group_of_its_own(path: Path, said: int) -> None:
    os.setsid()
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    code = main(["bench", "refit", "--config", str(path), "--emulate"])
    os._exit(code)


def _wait_for_the_end_of_group(group: int) -> None:
    """Ranks are killed when the run ends; on a busy machine they need a moment. Fails when one lives for 20 s."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"ranks of process group {group} outlive the run")
