"""The page of known faults names tests that exist, and is honest about what none of them covers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
UNCOVERED = "not covered"


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """Cells of every table row that names what users saw, what happens here, and tests."""
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    tables = page.split("| what users saw | here | tests |\n|---|---|---|\n")[1:]
    lines = [line for table in tables for line in table.split("\n\n")[0].strip().splitlines()]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_test_that_the_page_names_exists(repository: Path, rows: list[list[str]]) -> None:
    named = {pair for row in rows for pair in TEST_ID.findall(row[-1])}
    assert len(named) > 50
    defined = {file: _tests_in(repository / file) for file, _ in named}
    assert sorted(f"{file}::{name}" for file, name in named if name not in defined[file]) == []


def test_every_fault_has_a_test_or_says_that_it_has_none(rows: list[list[str]]) -> None:
    assert len(rows) >= 52
    for row in rows:
        assert len(row) == 3, row[0]
        words = re.sub(r"[\s,]", "", TEST_ID.sub("", row[2]))
        assert (TEST_ID.search(row[2]) and not words) or row[2] == UNCOVERED, row[0]


def _tests_in(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
