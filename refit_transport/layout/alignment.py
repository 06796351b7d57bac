"""Where staged data may begin in memory."""

PAGE = 4096
LINE = 64
"""Messages start on a cache line, which also aligns every dtype."""


def aligned(nbytes: int, step: int = LINE) -> int:
    """``nbytes`` rounded up to a multiple of ``step``."""
    return -(-nbytes // step) * step
