"""Every key of the configuration, assembled from the sections of this package. This is the schema's one place."""

from __future__ import annotations

from functools import cache

from refit_transport.config.key import Key, Section
from refit_transport.config.keys.algorithm import GRPO, LOSS, PPO, VALUE_LOSS
from refit_transport.config.keys.generation import GENERATION, REFIT, VLLM
from refit_transport.config.keys.policy import DTENSOR, LORA, MEGATRON, POLICY, TINY_MODEL, VALUE
from refit_transport.config.keys.run import CHECKPOINTING, CLUSTER, DATA, ENV, LOGGER

SECTIONS: tuple[Section, ...] = (
    POLICY,
    TINY_MODEL,
    DTENSOR,
    LORA,
    MEGATRON,
    GENERATION,
    VLLM,
    *REFIT,
    GRPO,
    PPO,
    LOSS,
    VALUE,
    VALUE_LOSS,
    DATA,
    ENV,
    CLUSTER,
    LOGGER,
    CHECKPOINTING,
)

ALGORITHM_SECTIONS = {"grpo": ("grpo",), "ppo": ("ppo", "value", "value_loss_fn")}
"""Top-level sections that only one algorithm has; their defaults are filled in for that algorithm alone."""


@cache
def all_keys() -> dict[str, Key]:
    """Path to key, in the order of the documentation."""
    return {key.path: key for part in SECTIONS for key in part.keys}


SECTION_PATHS = tuple(
    dict.fromkeys(
        ".".join(parts[:length])
        for path in all_keys()
        for parts in [path.split(".")]
        for length in range(1, len(parts))
    )
)
"""Paths that lead to keys without being one, parents before what they hold."""
