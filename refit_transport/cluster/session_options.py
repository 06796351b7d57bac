"""From the configuration to the settings of a refit session, which every member receives from the control server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refit_transport.transports.registry import DEFAULT


def session_options(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The transport's name with its own options (``policy.generation.refit_cfg.<transport>``)."""
    generation = tree["policy"]["generation"]
    transport = generation["refit_transport"] or DEFAULT
    own = (generation.get("refit_cfg") or {}).get(transport) or {}
    options = {"timeout_s": 120.0, **own, "transport": transport}
    if options.get("domains", "auto") in ("auto", "segment") and tree["cluster"]["segment_size"]:
        options["segment_size"] = tree["cluster"]["segment_size"]
    return options
