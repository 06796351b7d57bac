"""What a refit returns: version, bytes by path and link, seconds by phase, and the one line that is logged."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RefitReport:
    """Sums and maxima over all ranks of one committed refit. Bytes are those that inference ranks received."""

    version: int
    transport: str
    wire: str
    seconds: float
    """From the first rank's start to the last rank's commit."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, each the maximum over ranks; phases overlap, so they need not add up."""
    bytes_reshard: int = 0
    bytes_broadcast: int = 0
    bytes_network: int = 0
    bytes_domain: int = 0
    bytes_local: int = 0
    messages: int = 0
    peak_extra_bytes: int = 0
    """Most staging memory that one rank used."""
    engine_ranks: int = 1
    unchanged_since: int | None = None
    """With ``verify: checksum``: the version before, when no byte that moved differs from it."""

    @property
    def bytes_by_path(self) -> dict[str, int]:
        return {"reshard": self.bytes_reshard, "broadcast": self.bytes_broadcast}

    @property
    def gb_per_second_per_rank(self) -> float:
        """Bytes stored per inference rank and second, in GB/s."""
        return (self.bytes_reshard + self.bytes_broadcast) / max(self.seconds, 1e-9) / self.engine_ranks / 1e9

    def line(self) -> str:
        """The INFO line of a refit."""
        split = " ".join(f"{name}={seconds:.3f}s" for name, seconds in self.phases.items() if seconds >= 0.0005)
        note = f" no weight changed since version {self.unchanged_since}" if self.unchanged_since is not None else ""
        return (
            f"refit version={self.version} transport={self.transport} wire={self.wire} {self.seconds:.3f}s "
            f"reshard={_size(self.bytes_reshard)} broadcast={_size(self.bytes_broadcast)} "
            f"network={_size(self.bytes_network)} domain={_size(self.bytes_domain)} "
            f"{self.gb_per_second_per_rank:.3f} GB/s per inference rank [{split}]{note}"
        )


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
