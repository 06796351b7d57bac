"""One configuration key: its type, default, allowed values and place in the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

REQUIRED = "required"
"""Stands for the default of a key that every configuration has to set. Its value is null until somebody does."""

DOCUMENT = "docs/configuration.md"


@dataclass(frozen=True, slots=True)
class Key:
    """A leaf of the configuration. ``kind`` ``dict`` is free-form below: its contents belong to somebody else."""

    path: str
    kind: type
    default: Any
    meaning: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive minimum."""
    optional: bool = False
    """``null`` is allowed."""
    values: type | None = None
    """What the values of a mapping are."""
    items: tuple[Key, ...] = ()
    """A list holds mappings of these keys, whose paths are relative to an item."""

    @property
    def anchor(self) -> str:
        return f"{DOCUMENT}#{anchor_id(self.path)}"

    @property
    def nullable(self) -> bool:
        return self.optional or self.default is None

    def allowed(self) -> str:
        """What may stand here, in words: ``integer >= 1``, ``ffn, all``."""
        if self.choices:
            words = ", ".join(as_yaml(choice) for choice in self.choices)
        elif self.items:
            words = f"list of mappings of {', '.join(item.path for item in self.items)}"
        elif self.values is not None:
            words = f"mapping of {_KIND_WORDS[self.values]}s"
        else:
            words = " and ".join([_KIND_WORDS[self.kind], *self._bounds()]).replace(" and ", " ", 1)
        return f"{words} or null" if self.nullable and None not in self.choices else words

    def _bounds(self) -> list[str]:
        limits = ((">=", self.minimum), (">", self.above), ("<=", self.maximum))
        return [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]

    def accepts(self, value: object) -> bool:
        """Whether ``value``, after ``coerce``, is of this key's type and within its bounds."""
        if value is None:
            return self.nullable or None in self.choices
        if self.kind is bool:
            typed = isinstance(value, bool)
        elif self.kind is float:
            typed = isinstance(value, int | float) and not isinstance(value, bool)
        elif self.kind is int:
            typed = isinstance(value, int) and not isinstance(value, bool)
        elif self.kind is list:
            typed = isinstance(value, Sequence) and not isinstance(value, str)
        elif self.kind is dict:
            typed = isinstance(value, Mapping) and self._holds(value.values())
        else:
            typed = isinstance(value, self.kind)
        return typed and (not self.choices or value in self.choices) and self._within(value)

    def _holds(self, values: Iterable[object]) -> bool:
        return self.values is None or all(isinstance(value, self.values) for value in values)

    def _within(self, value: Any) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def coerce(self, value: object) -> object:
        """YAML reads ``1e6`` as a float and ``1`` as an integer; both are meant as the key's own type."""
        if isinstance(value, float) and self.kind is int and value.is_integer():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and self.kind is float:
            return float(value)
        return value


@dataclass(frozen=True, slots=True)
class Section:
    """Keys under one prefix, documented together."""

    prefix: str
    title: str
    meaning: str
    keys: tuple[Key, ...]


def section(prefix: str, title: str, meaning: str, *keys: Key) -> Section:
    """A section whose keys were written relative to ``prefix``."""
    return Section(prefix, title, meaning, tuple(replace(key, path=f"{prefix}.{key.path}") for key in keys))


def anchor_id(path: str) -> str:
    """``policy.generation.colocated.enabled`` -> ``policy-generation-colocated-enabled``."""
    return path.replace(".", "-").replace("_", "-").strip("-").lower()


def as_yaml(value: object) -> str:
    """A value as the user would write it in YAML, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {as_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(as_yaml(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


_KIND_WORDS = {
    int: "integer",
    float: "number",
    bool: "true, false",
    str: "string",
    list: "list",
    dict: "mapping",
}
