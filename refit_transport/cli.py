"""The command `refit-transport`. Each subcommand lives in its own module, which is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

COMMANDS = {
    "grpo": ("refit_transport.cli_run", "run a GRPO recipe"),
    "ppo": ("refit_transport.cli_run", "run a PPO recipe"),
    "validate": ("refit_transport.cli_validate", "check a configuration without starting anything"),
    "plan": ("refit_transport.cli_plan", "plan a refit without any GPU, and predict how long it takes"),
    "classify": ("refit_transport.cli_classify", "show which tensors of a model are resharded and which broadcast"),
    "bench": ("refit_transport.cli_bench", "measure refits on this machine"),
    "transports": ("refit_transport.cli_transports", "list the transports that can be selected"),
}
"""Name to the module that implements it, and its one line of help."""


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_parser(self, subparsers: argparse._SubParsersAction, name: str, summary: str) -> None:
        """Add the subcommand with its arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code."""


class UsageError(ValueError):
    """A mistake of the user. The text is all that is shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Mistakes of the user end with code 2 and a short text, without a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    module = importlib.import_module(COMMANDS[wanted][0]) if wanted in COMMANDS else None
    args = _parser(wanted, module).parse_args(argv)
    if module is None:
        _parser(None, None).print_help()
        return EXIT_USAGE
    try:
        return module.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone, as in `refit-transport classify ... | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.traceback or not _explains_itself(error):
            raise
        print(f"refit-transport {wanted}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED


def _parser(wanted: str | None, module: Command | None) -> argparse.ArgumentParser:
    """The whole command's parser; only the subcommand that is called fills in its own arguments."""
    parser = argparse.ArgumentParser(
        prog="refit-transport",
        description="Move policy weights from trainers to inference engines after every RL step.",
    )
    parser.add_argument("--version", action="version", version=f"refit-transport {version('refit-transport')}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    subparsers = parser.add_subparsers(metavar="command")
    for name, (_, summary) in COMMANDS.items():
        if name == wanted and module is not None:
            module.add_parser(subparsers, name, summary)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _explains_itself(error: Exception) -> bool:
    """Errors of this package, and values that it refused, say what to do. Anything else is a bug: show where."""
    package = __name__.split(".")[0]
    if type(error).__module__.split(".")[0] == package:
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return isinstance(error, ValueError) and frames[-1][0].f_globals.get("__name__", "").split(".")[0] == package


if __name__ == "__main__":
    sys.exit(main())
