"""Links and the site's contents stay in step with the files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml


def test_every_page_is_in_the_navigation(repository: Path) -> None:
    site = yaml.safe_load((repository / "mkdocs.yml").read_text())
    listed = {page for entry in site["nav"] for page in _pages(entry)}
    written = {str(path.relative_to(repository / "docs")) for path in (repository / "docs").rglob("*.md")}
    assert listed == written


def test_the_readme_names_files_and_commands_that_exist(repository: Path) -> None:
    from refit_transport.cli import COMMANDS

    text = (repository / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    recipes = re.findall(r"recipes/[\w./-]+\.yaml", text)
    assert links and recipes
    assert [name for name in (*links, *recipes) if not (repository / name).exists()] == []
    assert set(re.findall(r"refit-transport (\w+)", text)) <= set(COMMANDS)


def test_no_file_names_the_host_of_a_package_index(repository: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt", "overrides.txt", "Makefile", ".ci/environment.py", ".ci/run"):
        assert not re.search(r"https?://|file://|index-url", (repository / name).read_text()), name


def _pages(entry: object) -> list[str]:
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in _pages(value)]
    return [page for item in entry for page in _pages(item)] if isinstance(entry, list) else [str(entry)]
