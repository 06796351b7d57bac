"""One thing that is wrong with a configuration, as one line of text."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.config.key import as_yaml


@dataclass(frozen=True, slots=True)
class Violation:
    """``found`` stands at ``key`` (set at ``where``), but only ``allowed`` may; ``anchor`` explains it."""

    key: str
    found: object
    allowed: str
    anchor: str
    where: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.key}: found {as_yaml(self.found)}{place}; allowed: {self.allowed}; see {self.anchor}"


class InvalidConfigError(ValueError):
    """A configuration with violations, one line each."""

    def __init__(self, violations: list[Violation]) -> None:
        super().__init__("\n".join(str(violation) for violation in violations))
        self.violations = violations
