"""Fixtures of the vLLM tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_engines import Family


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    """``families(name)``: the engine of a family. One is alive at a time, because vLLM's process groups are global."""
    folder = tmp_path_factory.mktemp("families")
    alive: dict[str, Family] = {}

    def close() -> None:
        for family in alive.values():
            family.close()
        alive.clear()

    def get(name: str) -> Family:
        if name not in alive:
            close()
            alive[name] = Family(name, folder)
        return alive[name]

    yield get
    close()
