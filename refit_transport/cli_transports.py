"""`refit-transport transports`: what `policy.generation.refit_transport` may be here, and what failed to load."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    """No arguments."""
    subparsers.add_parser(name, help=summary, description=f"{summary}.")


def run(args: argparse.Namespace) -> int:
    """One line per transport."""
    from refit_transport.transports.registry import BUILT_IN, DEFAULT, load_failures, transport_names

    failures = load_failures()
    names = transport_names()
    width = max(len(name) for name in names)
    for name in names:
        origin = "built in" if name in BUILT_IN else "plug-in"
        note = "; what null means" if name == DEFAULT else ""
        state = f"failed to load: {failures[name]}" if name in failures else f"{origin}{note}"
        print(f"{name:{width}}  {state}")
    return 0
