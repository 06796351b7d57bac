"""Refit: move policy weights from trainer ranks to inference ranks, shard to shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collective import reshard

__all__ = ["reshard"]


def __getattr__(name: str) -> Any:
    """``reshard`` needs torch, which planning and configuration do without; so it is imported when it is asked for."""
    if name == "reshard":
        from importlib import import_module

        return import_module(".collective", __name__).reshard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
