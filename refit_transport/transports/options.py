"""From a transport's options (`policy.generation.refit_cfg.<transport>`) to the planner's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refit_transport.planning.plan import PlanOptions

_TAKEN = (
    "bucket_bytes",
    "stripe_bytes",
    "once_per_domain",
    "relay",
    "network_ports",
    "broadcast_root",
    "wire_dtype",
)


def plan_options(cfg: Mapping[str, Any], **defaults: Any) -> PlanOptions:
    """The options that ``cfg`` sets, over ``defaults``, over the planner's own defaults."""
    return PlanOptions(**(defaults | {key: cfg[key] for key in _TAKEN if cfg.get(key) is not None}))
