"""Makes `.venv` with everything a run needs, once: `python3 .ci/environment.py EXTRA [EXTRA ...]`.

Needs Python 3.11 or newer and nothing else. What is installed is remembered by a hash of the files that decide it, so
that a second call takes no time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
UV = ROOT / ".venv" / ("Scripts/uv.exe" if os.name == "nt" else "bin/uv")
DECIDING_FILES = ("pyproject.toml", "constraints.txt", "overrides.txt")


def main(extras: list[str]) -> None:
    """Install the package with ``extras`` into `.venv`, unless that has been done from the same files."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this is the one file that an older Python may run)
        version = sys.version.split()[0]
        sys.exit(f"Python 3.11 or newer is needed, this is {version}; name another: make PYTHON=python3.12")
    stamp = VENV / f".installed-{'-'.join(sorted(extras))}"
    state = _state()
    if stamp.is_file() and stamp.read_text() == state:
        return
    if not PYTHON.exists():
        _run(sys.executable, "-m", "venv", str(VENV))
    if not UV.exists():
        _run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"uv=={_pinned('uv')}")
    find_links = _find_links()
    # The certificates of the system are those that pip uses, behind a company's proxy too.
    environment = {"UV_SYSTEM_CERTS": "true"} | os.environ | ({"UV_FIND_LINKS": find_links} if find_links else {})
    print(f"installing refit_transport[{','.join(extras)}] into {VENV}", flush=True)
    _run(
        *(str(UV), "pip", "install", "--quiet", "--python", str(PYTHON), "--editable", f"{ROOT}[{','.join(extras)}]"),
        *("--constraint", str(ROOT / "constraints.txt"), "--override", str(ROOT / "overrides.txt")),
        *_torch_arguments(extras, find_links),
        # Where Python keeps no bytecode of what it imports, each of a run's dozen processes would compile it again.
        *(["--compile-bytecode"] if os.environ.get("PYTHONDONTWRITEBYTECODE") else []),
        environment=environment,
    )
    stamp.write_text(state)


def _torch_arguments(extras: list[str], find_links: str) -> list[str]:
    """CPU builds of torch are not on the default index. Where pip was told of a place that has one, uv finds it there;
    elsewhere uv knows by itself where they are."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wanted = f"torch-{_pinned('torch')}+cpu-{python}-*.whl"
    local = any(folder.is_dir() and any(folder.glob(wanted)) for folder in map(Path, _split(find_links)))
    return [] if local or "cpu" not in extras else ["--torch-backend", "cpu"]


def _find_links() -> str:
    """Where pip looks for packages besides its index, in the form that uv reads: separated by commas."""
    named = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    if not named:
        asked = subprocess.run(
            [str(PYTHON), "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
        )
        named = asked.stdout if asked.returncode == 0 else ""
    return ",".join(_split(named))


def _split(places: str) -> list[str]:
    return places.replace(",", " ").split()


def _pinned(package: str) -> str:
    """Version of ``package`` in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def _state() -> str:
    digest = hashlib.sha256(sysconfig.get_python_version().encode())
    for name in DECIDING_FILES:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    """Run a command; end this one with the same code when it fails."""
    code = subprocess.run(command, env=environment).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu", "dev"])
