"""`nccl_reshard`: feed-forward projections go shard to shard, once per domain; the rest is gathered and broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from refit_transport.layout.layout import LogicalParameter
from refit_transport.planning.classify import classify
from refit_transport.planning.plan import PlanOptions

from .options import plan_options
from .registry import register_transport


@register_transport("nccl_reshard")
class NcclReshard:
    """``scope: ffn`` sends feed-forward projections directly, ``scope: all`` every parameter that can be mapped."""

    name = "nccl_reshard"

    def plan_options(self, cfg: Mapping[str, Any]) -> PlanOptions:
        return plan_options(cfg, broadcast_root="every")

    def direct_names(self, parameters: Iterable[LogicalParameter], cfg: Mapping[str, Any]) -> frozenset[str]:
        if cfg.get("scope", "ffn") == "all":
            return frozenset(parameter.name for parameter in parameters)
        return classify(parameters).reshard

    def wire_name(self, cfg: Mapping[str, Any]) -> str:
        return cfg.get("wire", "auto")
