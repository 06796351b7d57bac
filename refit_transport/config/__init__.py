"""The configuration: schema, inheritance, overrides, validation of everything at once."""

from refit_transport.config.load import ConfigError, Loaded, algorithms, load_config, read_config, save_resolved
from refit_transport.config.validate import load_valid, validate
from refit_transport.config.violation import InvalidConfigError, Violation

__all__ = [
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
