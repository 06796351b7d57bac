"""The configuration: schema, inheritance, overrides, validation of everything at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refit_transport.config.load import ConfigError, Loaded, algorithms, load_config, read_config, save_resolved
    from refit_transport.config.setup import Cluster
    from refit_transport.config.validation import load_valid, validate
    from refit_transport.config.violation import InvalidConfigError, Violation

_HOMES = {
    "Cluster": "setup",
    "ConfigError": "load",
    "InvalidConfigError": "violation",
    "Loaded": "load",
    "Violation": "violation",
    "algorithms": "load",
    "load_config": "load",
    "load_valid": "validation",
    "read_config": "load",
    "save_resolved": "load",
    "validate": "validation",
}

__all__ = [
    "Cluster",
    "ConfigError",
    "InvalidConfigError",
    "Loaded",
    "Violation",
    "algorithms",
    "load_config",
    "load_valid",
    "read_config",
    "save_resolved",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line starts without OmegaConf."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
