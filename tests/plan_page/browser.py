"""Headless Chromium for the page's tests: the drawn document, a screenshot, what it logged and what it asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OWN = ("not an origin", None)
"""Initiators of requests that the browser makes for itself."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the browser made of a page."""

    dom: str
    console: list[str]
    requests: set[str]
    """Network addresses that the page asked for."""


def draw(page: Path, work: Path, fragment: str = "") -> Drawn:
    """Load ``page`` and return it as drawn."""
    net_log = work / "net.json"
    arguments = ["--enable-logging=stderr", f"--log-net-log={net_log}", "--dump-dom"]
    done = _run(page, work, arguments, fragment)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Drawn(done.stdout, console, _requests(net_log))


def screenshot(
    page: Path, work: Path, target: Path, *, dark: bool = False, size: tuple[int, int] = (1366, 768)
) -> Path:
    """Write the top of ``page``, as seen on a screen of ``size``, to ``target``."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run(page, work, [f"--screenshot={target}", f"--window-size={size[0]},{size[1]}", "--hide-scrollbars", scheme], "")
    return target


def _run(page: Path, work: Path, arguments: list[str], fragment: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={work / 'profile'}",
        *arguments, f"{page.resolve().as_uri()}{fragment}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def _requests(net_log: Path) -> set[str]:
    text = net_log.read_text().rstrip().rstrip(",")
    try:
        events = json.loads(text)["events"]
    except ValueError:  # a browser that stops at once leaves the list open
        events = json.loads(text + "]}")["events"]
    found = set()
    for event in events:
        parameters = event.get("params") or {}
        url = str(parameters.get("url", ""))
        if url.startswith(("http:", "https:", "ws:", "wss:")) and parameters.get("initiator") not in _OWN:
            found.add(url)
    return found
