"""What `make` installs, and from where, on machines that differ in what pip was told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / ".ci" / "environment.py"
_SPEC = importlib.util.spec_from_file_location("environment", _PATH)
environment = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(environment)


HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("wheel", "extras", "expected"),
    [
        (f"torch-{{torch}}+cpu-{HERE}-{HERE}-linux_x86_64.whl", ["cpu", "dev"], []),
        ("torch-{torch}+cpu-cp39-cp39-linux_x86_64.whl", ["cpu"], ["--torch-backend", "cpu"]),
        (f"torch-2.0.0+cpu-{HERE}-{HERE}-linux_x86_64.whl", ["cpu"], ["--torch-backend", "cpu"]),
        ("something_else.whl", ["cpu"], ["--torch-backend", "cpu"]),
        ("something_else.whl", ["docs"], []),
    ],
)
def test_a_cpu_torch_is_looked_for_where_pip_has_one_and_else_where_uv_knows(
    tmp_path: Path, wheel: str, extras: list[str], expected: list[str]
) -> None:
    (tmp_path / wheel.format(torch=environment._pinned("torch"))).touch()
    assert environment._torch_arguments(extras, str(tmp_path)) == expected


def test_places_that_pip_was_told_of_reach_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    assert environment._find_links() == "/a,/b"


def test_nothing_is_done_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.DECIDING_FILES:
        (tmp_path / name).write_text("uv==1\ntorch==1\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    ran = []
    monkeypatch.setattr(environment, "_run", lambda *command, **_: ran.append(command))
    monkeypatch.setattr(environment, "_find_links", lambda: "")
    (tmp_path / ".venv").mkdir()

    environment.main(["docs"])
    first = len(ran)
    environment.main(["docs"])
    assert (first > 0, len(ran)) == (True, first)
    (tmp_path / "constraints.txt").write_text("uv==2\ntorch==1\n")
    environment.main(["docs"])
    assert len(ran) > first
