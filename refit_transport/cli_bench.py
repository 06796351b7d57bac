"""`refit-transport bench`: measure refits on this machine, between plain processes or on an emulated cluster."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

EXIT_MISSED = 1


def add_parser(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    """``bench refit`` and ``bench engine``."""
    parser = subparsers.add_parser(name, help=summary, description=__doc__)
    kinds = parser.add_subparsers(metavar="what", required=True, dest="what")
    refit = kinds.add_parser("refit", help="refits between plain processes, transports beside each other")
    refit.add_argument("--config", type=Path, required=True, help="YAML file, such as configs/bench/rows4-tp2xdp2.yaml")
    refit.add_argument("overrides", nargs="*", help="key=value over the configuration")
    refit.add_argument(
        "--emulate", action="store_true", help="on emulated nodes, as root: bytes counted at their cards"
    )
    refit.add_argument("--rounds", type=int, help="timed refits per transport (default: the configuration's)")
    refit.add_argument("--json", type=Path, help="write all figures to this file")
    refit.add_argument("--plot", type=Path, help="draw them into this file (.png, .svg, .pdf)")
    refit.add_argument(
        "--check", action="store_true", help="exit with 1 unless every target of the configuration is met"
    )
    refit.set_defaults(measure=_refit)
    engine = kinds.add_parser("engine", help="refits into a vLLM engine, phase by phase")
    engine.add_argument("--model", type=Path, required=True, help="checkpoint directory with safetensors")
    engine.add_argument("--transport", default="nccl_reshard", choices=("nccl_reshard", "gather_broadcast"))
    engine.add_argument("--scope", default="ffn", choices=("ffn", "all"))
    engine.add_argument("--trainers", type=int, default=2, help="trainer ranks, which share the rows of every tensor")
    engine.add_argument("--tensor-parallel", type=int, default=1)
    engine.add_argument("--requests", type=int, default=4, help="requests in flight, all the time")
    engine.add_argument("--pause", default="keep", choices=("keep", "wait", "abort"), help="what becomes of them")
    engine.add_argument("--rounds", type=int, default=5)
    engine.add_argument("--max-model-len", type=int, default=256)
    engine.add_argument("--json", type=Path)
    engine.set_defaults(measure=_engine)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    return args.measure(args)


def _refit(args: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The namespaces and ranks of a run are removed on the way out, so that a polite kill must lead there.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from refit_transport.bench.config import load
    from refit_transport.bench.plot import draw
    from refit_transport.bench.refit import measure
    from refit_transport.bench.results import summarise
    from refit_transport.bench.table import show

    overrides = [*args.overrides, *([f"rounds={args.rounds}"] if args.rounds else [])]
    config = load(args.config, overrides)
    summary = summarise(measure(config, emulate=args.emulate, progress=_say))
    show(summary)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(summary, args.plot)
    missed = [key for key, target in summary["targets"].items() if not target["met"]]
    return EXIT_MISSED if args.check and missed else 0


def _engine(args: argparse.Namespace) -> int:
    from refit_transport.bench.engine import EngineCase, measure_engine

    options = {"max_model_len": args.max_model_len, "enforce_eager": True}
    given = ("model", "transport", "scope", "trainers", "tensor_parallel", "requests", "pause", "rounds")
    case = EngineCase(**{key: getattr(args, key) for key in given}, engine_options=options)
    figures = measure_engine(case)
    print(f"{case.rounds} refits of {figures['bytes'] / 1e6:,.2f} MB, {case.requests} requests in flight; medians")
    for phase, seconds in figures["seconds_median"].items():
        print(f"{phase:10s} {seconds * 1e3:10.2f} ms")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
