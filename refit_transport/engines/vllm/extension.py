"""Methods that ``collective_rpc`` can call by name on every vLLM worker.

Use ``worker_extension_cls="refit_transport.engines.vllm.extension.RefitExtension"``. Importing it also registers the
engines, so it works where ``VLLM_PLUGINS`` leaves this package's plugin out.
"""

from __future__ import annotations

from typing import Any

from .fingerprint import fingerprint
from .plugin import register

register()


class RefitExtension:
    """Becomes a base class of vLLM's worker."""

    weight_transfer_engine: Any
    model_runner: Any

    def refit_status(self) -> dict[str, Any]:
        """See ``ReshardEngine.refit_status``."""
        return self.weight_transfer_engine.refit_status()

    def weight_fingerprint(self) -> dict[str, str]:
        """See ``fingerprint``. Paths in a draft model begin with ``draft.``."""
        found = fingerprint(self.model_runner.get_model())
        if (draft := self.model_runner.get_draft_model()) is not None:
            found.update((f"draft.{path}", digest) for path, digest in fingerprint(draft).items())
        return found
