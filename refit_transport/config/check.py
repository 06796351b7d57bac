"""Checks a configuration key by key against the schema: unknown names, types, allowed values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from refit_transport.config.foreign import FOREIGN, foreign_prefix, is_inert
from refit_transport.config.key import DOCUMENT, REQUIRED, Key, anchor_id
from refit_transport.config.keys import SECTION_PATHS, all_keys
from refit_transport.config.violation import Violation


def check_keys(config: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Violation]:
    """Violations of single keys, in the order of the configuration. ``config`` is plain nested data, resolved."""
    yield from _walk(config, "", origins)


def select(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of nested mappings, or None where the path leads nowhere."""
    node: Any = config
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def nearest_key(path: str) -> str | None:
    """The known key that somebody who wrote ``path`` most likely meant: same name elsewhere, else similar spelling."""
    leaf = path.rpartition(".")[2]
    same_leaf = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
    near = get_close_matches(path, [*all_keys(), *SECTION_PATHS], n=1, cutoff=0.8)
    near = near or get_close_matches(path, same_leaf, n=1, cutoff=0.4)
    return near[0] if near else None


def _walk(node: Mapping[str, Any], prefix: str, origins: Mapping[str, str]) -> Iterator[Violation]:
    for name, value in node.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        where = origins.get(path, "")
        key = all_keys().get(path)
        if key is not None:
            yield from _check_value(key, value, where)
        elif path in SECTION_PATHS:
            if isinstance(value, Mapping):
                yield from _walk(value, path, origins)
            else:
                yield Violation(path, value, "mapping", f"{DOCUMENT}#{anchor_id(path)}", where)
        elif foreign := foreign_prefix(path):
            if not is_inert(value):
                yield Violation(path, value, f"not supported: {FOREIGN[foreign]}", f"{DOCUMENT}#not-supported", where)
        else:
            yield _unknown(path, value, where)


def _check_value(key: Key, value: object, where: str) -> Iterator[Violation]:
    if value is None and isinstance(key.default, str) and key.default.startswith("${") and not where:
        return  # what it points at is reported
    if value is None and key.default == REQUIRED:
        yield Violation(key.path, None, f"{key.allowed()}, required", key.anchor, where)
    elif not key.accepts(value):
        yield Violation(key.path, value, key.allowed(), key.anchor, where)
    elif key.items and value is not None:
        yield from (Violation(key.path, value, text, key.anchor, where) for text in _check_items(key, value))


def _check_items(key: Key, value: Sequence[object]) -> Iterator[str]:
    """What is allowed instead, per wrong item."""
    known = {item.path: item for item in key.items}
    if not value:
        yield "one item or more, or null"
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            yield f"a mapping as item {index}"
            continue
        for name, inner in item.items():
            if name not in known:
                yield f"{', '.join(known)} in item {index}, not {name}"
            elif inner is None or not known[name].accepts(inner):
                yield f"{name} in item {index}: {known[name].allowed()}"


def _unknown(path: str, value: object, where: str) -> Violation:
    near = nearest_key(path)
    hint = f"no such key; did you mean {near}?" if near else "no such key"
    anchor = f"{DOCUMENT}#{anchor_id(near)}" if near else DOCUMENT
    return Violation(path, value, hint, anchor, where)
