"""How long planning takes and how much memory: large models, more ranks, more tensors. ``python -m`` this module.

Each case runs in a process of its own that is bound to one core, so its memory is its own. A case plans the whole refit
and compiles the program of one trainer rank and of one inference rank; the slower of the two counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from refit_transport.layout import LogicalParameter, SideDescription
from refit_transport.planning import Plan, compile_program, plan_refit
from refit_transport.planning.presets import (
    Generation,
    Training,
    describe_generation,
    describe_training,
    domains_for,
    load_cluster,
    load_model,
)

CLUSTER = "dgx-h100"


@dataclass(frozen=True, slots=True)
class Case:
    """One model on two layouts, with what it may take."""

    name: str
    model: str
    training: Training
    generation: Generation
    seconds: float | None = None
    """Most seconds for the plan and one rank's program; None for a point of a curve."""
    mebibytes: float | None = None
    """Most resident memory of the whole process."""
    layers: int | None = None
    """Only this many layers of the model."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a case took. Times are seconds, memory is mebibytes."""

    name: str
    tensors: int
    trainers: int
    engines: int
    groups: int
    transfers: int
    buckets: int
    peers: int
    """Most ranks that one of the two compiled ranks exchanges messages with."""
    plan_seconds: float
    compile_seconds: float
    cpu_seconds: float
    """Processor time of both; below the sum of the two when the machine does other things as well."""
    mebibytes: float


LARGE = (
    Case("DeepSeek-V3 671B, PP16 x EP16 -> TP32 x DP8", "deepseek-v3",
         Training(pp=16, ep=16), Generation(tp=32, dp=8), seconds=2.0, mebibytes=1024),
    Case("Qwen3.8 2.4T (assumed shapes), PP16 x EP128 -> TP32 x DP32", "qwen3.8-2.4t-a95b",
         Training(pp=16, ep=128), Generation(tp=32, dp=32), seconds=10.0),
    Case("Kimi K3 2.8T (assumed shapes), PP16 x EP128 -> TP32 x DP32", "kimi-k3-2.8t",
         Training(pp=16, ep=128), Generation(tp=32, dp=32), seconds=10.0),
)  # fmt: skip

RANKS = tuple(
    Case(f"DeepSeek-V3, {n} -> {n} ranks", "deepseek-v3",
         Training(pp=min(16, n // 16), ep=16, dp=max(16, n // 16)), Generation(tp=32, dp=n // 32))
    for n in (64, 128, 256, 512, 1024, 2048, 4096)
)  # fmt: skip

TENSORS = tuple(
    Case(f"DeepSeek-V3, {layers} layers", "deepseek-v3", Training(pp=4, ep=16), Generation(tp=32, dp=8), layers=layers)
    for layers in (8, 15, 30, 61)
)

SUITES = {"large": LARGE, "ranks": RANKS, "tensors": TENSORS}


def measure(case: Case) -> Measured:
    """Plans and compiles ``case`` in this process."""
    model, trainers = load_model(case.model), case.training.world
    source = _first_layers(describe_training(model, case.training, 0), case.layers)
    sink = _first_layers(describe_generation(model, case.generation, trainers), case.layers)
    domains = domains_for(load_cluster(CLUSTER), trainers, case.generation.world)
    parameters = [LogicalParameter(e.name, source.layout_of(e).shape, e.dtype) for e in source.entries]
    cpu, start = time.process_time(), time.perf_counter()
    plan = plan_refit(source, sink, parameters, domains)
    planned = time.perf_counter()
    cpu_planned = time.process_time()
    seconds, cpu_seconds, peers = max(_compile(plan, rank) for rank in (0, trainers))
    return Measured(
        name=case.name,
        tensors=len(parameters),
        trainers=trainers,
        engines=case.generation.world,
        groups=len(plan.groups),
        transfers=sum(len(group.transfers) for group in plan.groups),
        buckets=len(plan.buckets),
        peers=peers,
        plan_seconds=planned - start,
        compile_seconds=seconds,
        cpu_seconds=cpu_planned - cpu + cpu_seconds,
        mebibytes=_peak_mebibytes(),
    )


def _peak_mebibytes() -> float:
    """Most resident memory since this program began. ``ru_maxrss`` would count the process that started it as well."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _compile(plan: Plan, rank: int) -> tuple[float, float, int]:
    """(seconds, processor seconds, peers) of one rank's program."""
    cpu, start = time.process_time(), time.perf_counter()
    program = compile_program(plan, rank)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    peers = {message.peer for bucket in program.buckets for message in (*bucket.sends, *bucket.recvs)}
    return seconds, cpu_seconds, len(peers)


def _first_layers(side: SideDescription, layers: int | None) -> SideDescription:
    if layers is None:
        return side
    return SideDescription(side.layouts, tuple(e for e in side.entries if _layer(e.name) < layers))


def _layer(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def run(suite: str, number: int) -> Measured:
    """Measures a case in a new process on one core."""
    command = [sys.executable, "-m", "refit_transport.bench.planning", "--one", suite, str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{SUITES[suite][number].name}: exit code {done.returncode}\n{done.stderr}")
    return Measured(**json.loads(done.stdout))


def missed(case: Case, found: Measured) -> list[str]:
    """The targets of ``case`` that it did not meet, in words. Processor time counts, so that neighbours do not."""
    violations = []
    if case.seconds is not None and found.cpu_seconds > case.seconds:
        violations.append(f"{case.name}: {found.cpu_seconds:.2f} s of processor time, allowed {case.seconds} s")
    if case.mebibytes is not None and found.mebibytes > case.mebibytes:
        violations.append(f"{case.name}: {found.mebibytes:.0f} MiB, allowed {case.mebibytes:.0f} MiB")
    return violations


def table(rows: Sequence[tuple[Case, Measured]]) -> str:
    """Fixed-width text."""
    head = ("case", "tensors", "transfers", "buckets", "peers", "plan s", "compile s", "cpu s", "allowed", "MiB")
    lines = [head]
    for case, m in rows:
        allowed = "-" if case.seconds is None else f"{case.seconds:g} s"
        times = (f"{m.plan_seconds:.2f}", f"{m.compile_seconds:.2f}", f"{m.cpu_seconds:.2f}")
        lines.append((m.name, *map(str, (m.tensors, m.transfers, m.buckets, m.peers)), *times, allowed,
                      f"{m.mebibytes:.0f}"))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when a case misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="default: all")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--one", nargs=2, metavar=("SUITE", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(json.dumps(asdict(measure(SUITES[options.one[0]][int(options.one[1])]))))
        return 0
    measured: list[tuple[Case, Measured]] = []
    for suite in options.suites or SUITES:
        rows = [(case, run(suite, number)) for number, case in enumerate(SUITES[suite])]
        print(table(rows) + "\n", flush=True)
        measured += rows
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for _, found in measured], indent=1))
    violations = [line for case, found in measured for line in missed(case, found)]
    print("\n".join(violations))
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
