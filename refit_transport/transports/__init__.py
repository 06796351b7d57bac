"""Registry of transports, and the two that ship: nccl_reshard and gather_broadcast."""
