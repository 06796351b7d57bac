"""Transports by name: the built-in ones, those that other packages offer, and ``module:ClassName``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from refit_transport.transports.base import Transport

DEFAULT = "gather_broadcast"
"""What ``refit_transport: null`` means."""

ENTRY_POINT_GROUP = "refit_transport.transports"

BUILT_IN = {
    "nccl_reshard": "refit_transport.transports.nccl_reshard",
    "gather_broadcast": "refit_transport.transports.gather_broadcast",
}
"""Name to the module that registers it when it is imported. A table, so that a name is known without its imports."""

_METHODS = ("plan_options", "direct_names", "wire_name")

Class = TypeVar("Class", bound=type)

_registered: dict[str, type] = {}


class UnknownTransportError(ValueError):
    """No transport of that name. ``allowed`` lists the known ones and those that failed to load, with the reason."""

    def __init__(self, name: str, allowed: str) -> None:
        super().__init__(f"policy.generation.refit_transport: found {name}; allowed: {allowed}")
        self.allowed = allowed


def register_transport(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a transport known as ``name``. Raises ValueError when another class has the name."""

    def register(cls: Class) -> Class:
        other = _registered.get(name) or cls
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"transport {name!r} is {other.__module__}:{other.__qualname__} already; choose another name"
            )
        _registered[name] = cls
        return cls

    return register


def get_transport(name: str | None) -> Transport:
    """An instance of the transport: a registered name, ``module:ClassName``, or None for gather-and-broadcast.

    Raises UnknownTransportError when there is none, or when it cannot be imported, with the reason."""
    name = name or DEFAULT
    try:
        return _load(name)()
    except Exception as error:
        raise UnknownTransportError(name, _explain(name, error)) from error


def check_transport(name: str | None) -> None:
    """Raises UnknownTransportError for a name that ``get_transport`` would refuse, without importing built-in ones."""
    if (name or DEFAULT) not in BUILT_IN:
        get_transport(name)


def transport_names() -> list[str]:
    """Every name that can be written in a configuration, besides ``module:ClassName``."""
    return sorted({*BUILT_IN, *_registered, *_offered()})


def load_failures() -> dict[str, str]:
    """Name to reason, for every known transport that cannot be imported here."""
    failures = {}
    for name in transport_names():
        try:
            _load(name)
        except Exception as error:
            failures[name] = _reason(error)
    return failures


@cache
def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(name: str) -> type:
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
        return _registered[name]
    if name in _offered():
        return _as_transport(_offered()[name].load())
    module, colon, attribute = name.partition(":")
    if not colon:
        raise KeyError(name)
    return _as_transport(getattr(importlib.import_module(module), attribute))


def _as_transport(cls: object) -> type:
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r} is not a class")
    missing = [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise TypeError(f"{cls.__module__}:{cls.__qualname__} is no transport, it lacks {', '.join(missing)}")
    return cls


def _explain(name: str, error: Exception) -> str:
    failures = load_failures()
    loaded = [known for known in transport_names() if known not in failures]
    words = f"{', '.join([*loaded, 'null'])}, or module:ClassName"
    failures = failures if isinstance(error, KeyError) else {name: _reason(error), **failures}
    reasons = "; ".join(f"{failed} failed to load: {reason}" for failed, reason in failures.items())
    return f"{words} ({reasons})" if reasons else words


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
