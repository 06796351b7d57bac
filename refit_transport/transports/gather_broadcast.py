"""`gather_broadcast`: what `refit_transport: null` means. Whole tensors, packed, to every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from refit_transport.layout.layout import LogicalParameter
from refit_transport.planning.plan import PlanOptions

from .options import plan_options
from .registry import register_transport


@register_transport("gather_broadcast")
class GatherBroadcast:
    """``root: every`` makes each trainer rank the root of the part it holds; ``root: single`` gathers on the lowest
    trainer rank, passes each bucket from domain to domain, and fans it out in each."""

    name = "gather_broadcast"

    def plan_options(self, cfg: Mapping[str, Any]) -> PlanOptions:
        return plan_options(cfg, broadcast_root=cfg.get("root") or "every")

    def direct_names(self, parameters: Iterable[LogicalParameter], cfg: Mapping[str, Any]) -> frozenset[str]:
        return frozenset()

    def wire_name(self, cfg: Mapping[str, Any]) -> str:
        return cfg.get("wire", "auto")
