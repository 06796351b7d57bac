"""Registers the `nccl_reshard` weight-transfer engine in every vLLM process (entry point `vllm.general_plugins`)."""


def register() -> None:
    """Called by vLLM in the front end, the engine core and every worker; may run more than once per process."""
