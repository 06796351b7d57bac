"""Reads a configuration: recipes that extend others, overrides, defaults of the schema, interpolations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from refit_transport.config.key import REQUIRED
from refit_transport.config.keys import ALGORITHM_SECTIONS, SECTION_PATHS, all_keys

COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """The configuration cannot be read at all: a missing or malformed file, a cycle, a malformed override."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A resolved configuration and where each of its values was set (``recipes/x.yaml:12``, ``command line``)."""

    config: DictConfig
    origins: Mapping[str, str] = field(default_factory=dict)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration of ``path``, defaults filled in and interpolations resolved. See ``read_config``."""
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Merge the files that ``path`` names under ``defaults``, the file itself, then ``key=value`` overrides.

    Raises ConfigError when that cannot be done; whether the values make sense is ``validate``'s affair."""
    origins: dict[str, str] = {}
    merged = _read_chain(Path(path), (), origins)
    for override in overrides:
        key, value = _parse_override(override)
        OmegaConf.update(merged, key, value, merge=True, force_add=True)
        origins.update(dict.fromkeys((key, *leaves(value, key)), COMMAND_LINE))
    chosen = algorithms(merged)
    replaced = _take_replaced_sections(merged)
    config = _resolve(OmegaConf.merge(schema_defaults(chosen), merged), str(path))
    for key, value in replaced.items():
        OmegaConf.update(config, key, value, merge=False)
    return Loaded(config, origins)


def save_resolved(config: DictConfig, folder: str | Path) -> Path:
    """Write the resolved configuration as ``config.yaml`` into ``folder`` (made if missing) and return its path."""
    target = Path(folder) / "config.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, target, resolve=True)
    return target


def algorithms(config: Mapping[str, Any] | DictConfig) -> tuple[str, ...]:
    """The algorithms that a configuration has a section for."""
    return tuple(name for name in ALGORITHM_SECTIONS if name in config)


def schema_defaults(wanted: Sequence[str]) -> DictConfig:
    """Every key's default, without the sections of algorithms that are not ``wanted``."""
    absent = {part for name, parts in ALGORITHM_SECTIONS.items() if name not in wanted for part in parts}
    defaults: dict[str, Any] = {}
    for path, key in all_keys().items():
        *parents, leaf = path.split(".")
        if path.split(".")[0] not in absent:
            holder = defaults
            for name in parents:
                holder = holder.setdefault(name, {})
            holder[leaf] = None if key.default == REQUIRED else key.default
    return OmegaConf.create(defaults)


def leaves(value: object, prefix: str = "") -> Iterator[str]:
    """Dotted paths of everything inside nested mappings; an empty mapping counts as a leaf."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix


def _read_chain(path: Path, above: tuple[Path, ...], origins: dict[str, str]) -> DictConfig:
    real = path.resolve()
    if real in above:
        raise ConfigError("defaults form a cycle: " + " -> ".join(_display(p) for p in (*above, real)))
    content = _read_file(path, above)
    bases = content.pop("defaults", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{_display(path)}: defaults must be a path or a list of paths, found {bases!r}")
    parts = [_read_chain(path.parent / base, (*above, real), origins) for base in bases]
    origins.update(_lines(path))
    merged = OmegaConf.merge(*parts, OmegaConf.create(content))
    assert isinstance(merged, DictConfig)
    return merged


def _read_file(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    named_by = f" (named under defaults in {_display(above[-1])})" if above else ""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"no such configuration: {_display(path)}{named_by}") from None
    except IsADirectoryError:
        raise ConfigError(f"{_display(path)} is a directory, not a configuration{named_by}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{_display(path)} is not valid YAML: {' '.join(str(error).split())}") from None
    except (OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{_display(path)} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{_display(path)}: a configuration is a mapping, found a {type(content).__name__}")
    return content


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each key of a file with the line that sets it."""
    shown = _display(path)

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, yaml.MappingNode):
            for name, inner in node.value:
                where = f"{prefix}.{name.value}" if prefix else name.value
                yield where, f"{shown}:{name.start_mark.line + 1}"
                yield from walk(inner, where)

    yield from walk(yaml.compose(path.read_text(), Loader=yaml.SafeLoader), "")


def _parse_override(text: str) -> tuple[str, object]:
    key, sign, raw = text.partition("=")
    key = key.strip()
    if not sign or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"override {text!r} is not of the form key=value, such as grpo.max_num_steps=10")
    try:
        # OmegaConf's reader and not plain YAML: it also takes 1e-3 as a number.
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {text!r}: {' '.join(str(error).split())}") from None


def _take_replaced_sections(merged: DictConfig) -> dict[str, object]:
    """Remove sections that were set to something else than a mapping, and return what they were set to. Others point
    into them, so they keep their defaults until all else is resolved. An empty section (null) means its defaults."""
    replaced = {}
    for path in SECTION_PATHS:
        parent, _, leaf = path.rpartition(".")
        holder = OmegaConf.select(merged, parent) if parent else merged
        if isinstance(holder, DictConfig) and leaf in holder and not isinstance(holder[leaf], DictConfig):
            value = holder.pop(leaf)
            if value is not None:
                replaced[path] = value
    return replaced


def _resolve(config: DictConfig | ListConfig, path: str) -> DictConfig:
    """Interpolations replaced by what they point at, numbers turned into their key's type."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    for key in all_keys().values():
        *parents, leaf = key.path.split(".")
        holder: Any = resolved
        for name in parents:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and leaf in holder:
            holder[leaf] = key.coerce(holder[leaf])
    return OmegaConf.create(resolved)  # type: ignore[call-overload]


def _display(path: Path) -> str:
    """Relative to the current directory where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
