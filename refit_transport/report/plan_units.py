"""Sizes and times as people read them: three significant digits and a unit."""

from __future__ import annotations

_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(nbytes: float) -> str:
    """``1342000000000`` as ``1.34 TB``."""
    for scale, unit in _SIZES:
        if nbytes >= scale:
            return f"{_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """``0.00978`` as ``9.78 ms``."""
    if value >= 1:
        return f"{_digits(value)} s"
    if value >= 1e-3:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value * 1e6)} us" if value else "0 s"


def count(value: int) -> str:
    """``1234567`` as ``1,234,567``."""
    return f"{value:,}"


def _digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
