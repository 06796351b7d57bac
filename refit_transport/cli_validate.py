"""`refit-transport validate`: every violation of a configuration, or what it would start."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from refit_transport.cli import EXIT_USAGE


def add_parser(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    """Arguments of the check."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary}.")
    parser.add_argument("config", metavar="RECIPE", help="recipe, such as those in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.add_argument("--resolved", action="store_true", help="print the whole resolved configuration")


def run(args: argparse.Namespace) -> int:
    """Print the violations to stderr, or a summary to stdout."""
    from refit_transport.config import InvalidConfigError, load_valid

    try:
        config = load_valid(args.config, args.overrides)
    except InvalidConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    from omegaconf import OmegaConf

    from refit_transport.config.setup import Setup
    from refit_transport.config.validation import not_runnable

    if args.resolved:
        print(OmegaConf.to_yaml(config, resolve=True), end="")
        return 0
    setup = Setup(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    model = setup.get("policy.model_name")
    print(f"{args.config} is valid: {setup.algorithm.upper()} of {model}, transport {setup.transport}")
    counts = Counter(setup.engines)
    engines = " + ".join(f"{counts[shape]} engine(s) of {shape.ranks} ranks ({shape})" for shape in counts)
    print(f"  {setup.train_ranks} {setup.trainer} trainer ranks -> {engines}")
    for violation in not_runnable(config):
        print(f"  it can be planned, but not run here: {violation}")
    if setup.model is None:
        print(f"  sizes were not checked: no config.json of {model} on this machine")
    return 0
