"""Fixtures of the vLLM tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from vllm_engines import Family


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """``families(name)``: the engines of a family, started when first asked for."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda name: Family(name, folder))
