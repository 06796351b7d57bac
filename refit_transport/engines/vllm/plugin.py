"""Registers the refit engines in every vLLM process (entry point ``vllm.general_plugins``).

vLLM loads its plugins in the front end, the engine core and every worker, unless the variable ``VLLM_PLUGINS`` lists
others only. A trainer process that uses vLLM's trainer-side interface has to call ``register`` itself.
"""

from __future__ import annotations

import os

BACKENDS = ("nccl_reshard", "gather_broadcast")
"""Names for ``WeightTransferConfig(backend=...)``. One engine serves both; the session chooses the transport."""

_PACKAGE = "refit_transport.engines.vllm"


def register() -> None:
    """Add the engines to vLLM's two registries, by path, so that nothing is imported before it is used. May run more
    than once per process. A name that vLLM already has is left alone."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "engine", "ReshardEngine"),
        (WeightTransferTrainerFactory, "trainer_engine", "ReshardTrainerEngine"),
    ):
        for backend in BACKENDS:
            if backend not in factory._registry:
                factory.register_engine(backend, f"{_PACKAGE}.{module}", name)
    if os.environ.get("REFIT_TRANSPORT_DIE_WITH_PARENT"):
        from refit_transport.cluster.orphans import die_with_parent

        die_with_parent()
