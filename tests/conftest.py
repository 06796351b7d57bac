"""What every test gets: one thread, no network, no usage reports; and which tests cannot run on this machine."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent


def _missing() -> dict[str, str | None]:
    """Marker to what this machine lacks for it."""
    gpu = Path("/dev/nvidiactl").exists()
    namespaces = getattr(os, "geteuid", lambda: 1)() == 0 and shutil.which("ip") and shutil.which("tc")
    engine = find_spec("vllm") and find_spec("ray")
    return {
        "gpu": None if gpu else "needs a CUDA device",
        "netns": None if namespaces else "needs root, ip and tc",
        "engine": None if engine else "needs vLLM and Ray: pip install -e '.[cpu]'",
    }


def _turn(item: pytest.Item) -> int:
    """Engines come last: one inside this process leaves its process groups behind, and Ray its threads, which tests
    that fork or make groups of their own cannot have."""
    if item.get_closest_marker("engine") is None:
        return 0
    return 1 if "cluster" in item.path.parts else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put engines last, and skip tests that cannot run here, saying why."""
    items.sort(key=_turn)
    for marker, reason in _missing().items():
        if reason:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout, where recipes and documentation are."""
    return ROOT
