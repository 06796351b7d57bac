"""A weight source for Megatron-core models."""

from .source import MegatronSource

__all__ = ["MegatronSource"]
