"""Dynamic sampling: prompts whose samples all earn the same reward teach nothing and are replaced by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from refit_transport.rl.rollout import Group


@dataclass
class DynamicSampler:
    """Collects groups with a signal over several generation batches until a step is full."""

    groups_per_step: int
    max_batches: int
    batches: int = 0
    generated: int = 0
    kept: list[Group] = field(default_factory=list)

    def add(self, groups: Sequence[Group]) -> None:
        self.batches += 1
        self.generated += len(groups)
        self.kept += [group for group in groups if group.has_signal]

    @property
    def full(self) -> bool:
        """Raises RuntimeError when the allowed batches are used up and the step is still not full."""
        if len(self.kept) >= self.groups_per_step:
            return True
        if self.batches >= self.max_batches:
            raise RuntimeError(
                f"dynamic sampling: {len(self.kept)} of {self.groups_per_step} prompts have rewards that differ after "
                f"{self.batches} generation batches ({self.generated} prompts); set dynamic_sampling_max_gen_batches "
                "or batch_multiplier higher, or use prompts that are neither solved nor hopeless"
            )
        return False

    def take(self) -> tuple[Group, ...]:
        """The step's groups; the surplus is cut."""
        return tuple(self.kept[: self.groups_per_step])

    def metrics(self) -> dict[str, float]:
        return {
            "dynamic_sampling_num_gen_batches": float(self.batches),
            "dynamic_sampling_kept_fraction": len(self.kept) / max(self.generated, 1),
            "dynamic_sampling_num_discarded_valid_prompts": float(max(0, len(self.kept) - self.groups_per_step)),
        }
