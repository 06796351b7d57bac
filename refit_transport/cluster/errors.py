"""What ends a run: an actor that died, failed, or did not answer in time."""


class ClusterError(RuntimeError):
    """Names the actor, what it was doing, and the cause."""
