"""Where log lines go in a run: all of them to `run.log` in the run's folder, the milestones to the terminal as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

ROOT = "refit_transport"
REFITS = "refit_transport.refit"
"""One INFO line per refit; it goes to the file alone, since the progress display shows refit times."""


@contextmanager
def run_log(folder: Path, console: Console) -> Iterator[None]:
    """Handlers on this package's logger for the block."""
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / "run.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    terminal = _Terminal(console)
    terminal.addFilter(lambda record: record.name != REFITS or record.levelno > logging.INFO)
    logger = logging.getLogger(ROOT)
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in (file, terminal):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, terminal):
            logger.removeHandler(handler)
        file.close()
        logger.setLevel(level)


class _Terminal(logging.Handler):
    """Plain lines through the console that also draws the progress bar, so that neither breaks the other."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        self._console.print(record.getMessage(), style=style, highlight=False, soft_wrap=True)
