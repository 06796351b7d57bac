"""`refit-transport grpo` and `refit-transport ppo`: check a recipe, then run it."""

from __future__ import annotations

import argparse
import sys

from refit_transport.cli import EXIT_USAGE


def add_parser(subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
    """Arguments of a run."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary}.")
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe, such as those in recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe")
    parser.set_defaults(algorithm=name)


def run(args: argparse.Namespace) -> int:
    """Validate, print every violation at once, or run to the end."""
    from refit_transport.config import InvalidConfigError, load_valid

    try:
        config = load_valid(args.config, args.overrides, algorithm=args.algorithm)
    except InvalidConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    from refit_transport.cluster import run as cluster_run

    {"grpo": cluster_run.run_grpo, "ppo": cluster_run.run_ppo}[args.algorithm](config)
    return 0
