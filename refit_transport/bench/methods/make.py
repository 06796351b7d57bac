"""Makes a method by the name that a configuration gives it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from .base import Method, RankContext

_PLACES = {
    "nccl_reshard": ("planned", "Planned"),
    "gather_broadcast": ("planned", "Planned"),
    "gather_broadcast_every": ("planned", "Planned"),
    "parameter_loop": ("parameter_loop", "ParameterLoop"),
    "checkpoint": ("checkpoint", "Checkpoint"),
    "stream": ("stream", "Stream"),
}


def preload(names: Iterable[str]) -> None:
    """Import what the methods need, once, before ranks are forked."""
    for name in names:
        _factory(name)


def make(name: str, context: RankContext) -> Method:
    """One rank's end of a method. Raises KeyError for a name that is not in ``config.TRANSPORTS``."""
    return _factory(name)(context, name)


def _factory(name: str) -> type:
    module, kind = _PLACES[name]
    return getattr(import_module(f".{module}", __package__), kind)
