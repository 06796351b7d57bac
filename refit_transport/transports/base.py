"""What a transport decides before a plan is made: the planner's options, which parameters go directly, which wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from refit_transport.layout.layout import LogicalParameter
    from refit_transport.planning.plan import PlanOptions


@runtime_checkable
class Transport(Protocol):
    """A way to refit. ``cfg`` holds the transport's own options, ``policy.generation.refit_cfg.<name>``. A transport
    has no state; it is instantiated without arguments, on every rank, and has to decide the same on each."""

    name: str

    def plan_options(self, cfg: Mapping[str, Any]) -> PlanOptions:
        """Options of the planner: bucket size, relay, broadcast root, wire dtype."""

    def direct_names(self, parameters: Iterable[LogicalParameter], cfg: Mapping[str, Any]) -> frozenset[str]:
        """Names that are to go shard to shard. Everything else is gathered and broadcast."""

    def wire_name(self, cfg: Mapping[str, Any]) -> str:
        """Wire that carries the bytes: ``tcp``, ``gloo``, ``nccl``, ``nccl_m2n``."""
