"""Every violation of a configuration at once, before anything heavy is imported or started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from refit_transport.config.check import check_keys
from refit_transport.config.key import DOCUMENT, anchor_id
from refit_transport.config.keys import ALGORITHM_SECTIONS
from refit_transport.config.load import algorithms, read_config, schema_defaults
from refit_transport.config.rules_layout import layout_rules
from refit_transport.config.rules_training import training_rules
from refit_transport.config.rules_transport import transport_rules
from refit_transport.config.setup import Cluster, Setup
from refit_transport.config.support import unsupported_rules
from refit_transport.config.tiny_models import TINY_MODELS
from refit_transport.config.violation import InvalidConfigError, Violation

ALGORITHM_ANCHOR = f"{DOCUMENT}#grpo"
RULES = (transport_rules, unsupported_rules, layout_rules, training_rules)


def validate(
    config: DictConfig, cluster: Cluster | None = None, origins: Mapping[str, str] | None = None
) -> list[Violation]:
    """All violations of a configuration that ``load_config`` returned, in the order of the file, then of the rules.

    ``cluster`` is what there really is, if known. Rules between keys run on top of single keys that are wrong, with
    those at their defaults, so that one run reports everything."""
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    origins = origins or {}
    found = [*_algorithm(config), *check_keys(plain, origins)]
    reported = {violation.key for violation in found}
    setup = Setup(_with_defaults_for(plain, reported), cluster, frozenset(reported))
    for rules in RULES:
        found += [violation for violation in rules(setup) if violation.key not in reported]
    return [replace(v, where=v.where or origins.get(v.key.partition("[")[0], "")) for v in _one_per_key(found)]


def _one_per_key(found: list[Violation]) -> list[Violation]:
    """A key that breaks several rules is one mistake, hence one line."""
    merged: dict[str, Violation] = {}
    for violation in found:
        first = merged.get(violation.key)
        allowed = f"{first.allowed}, and {violation.allowed}" if first else violation.allowed
        merged[violation.key] = replace(first or violation, allowed=allowed)
    return list(merged.values())


def load_valid(path: str | Path, overrides: Sequence[str] = (), algorithm: str | None = None) -> DictConfig:
    """The configuration that ``load_config`` reads, or InvalidConfigError with every violation. ``algorithm`` is what
    is about to run."""
    loaded = read_config(path, overrides)
    found = validate(loaded.config, origins=loaded.origins)
    named = algorithms(loaded.config)
    if algorithm and len(named) == 1 and named[0] != algorithm:
        found.append(Violation(algorithm, f"no such section in {path}", f"a recipe of {algorithm}", ALGORITHM_ANCHOR))
    if algorithm:
        reported = {violation.key for violation in found}
        found += [violation for violation in not_runnable(loaded.config) if violation.key not in reported]
    if found:
        raise InvalidConfigError(found)
    return loaded.config


def not_runnable(config: DictConfig) -> Iterator[Violation]:
    """What stands against running a configuration that can be planned: a missing model, a trainer that is not there."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    yield from unsupported_rules(Setup(plain), to_run=True)
    for key in ("policy.model_name", "value.model_name"):
        name = OmegaConf.select(config, key)
        if name and name not in TINY_MODELS and not Path(name).is_dir():
            allowed = f"a checkpoint's directory, or one of {', '.join(TINY_MODELS)}"
            yield Violation(key, name, allowed, f"{DOCUMENT}#{anchor_id(key)}")


def _algorithm(config: DictConfig) -> list[Violation]:
    named = algorithms(config)
    if len(named) == 1:
        return []
    found = "both grpo and ppo" if named else "neither grpo nor ppo"
    return [Violation("grpo", found, "exactly one section of " + ", ".join(ALGORITHM_SECTIONS), ALGORITHM_ANCHOR)]


def _with_defaults_for(plain: dict[str, Any], broken: set[str]) -> Mapping[str, Any]:
    """``plain`` with every broken key, and every section that is not one, replaced by what the schema says."""
    defaults = schema_defaults(algorithms(plain) or ("grpo",))
    sound = OmegaConf.merge(defaults, _without(plain, broken))
    return OmegaConf.to_container(sound, resolve=True)  # type: ignore[return-value]


def _without(node: Mapping[str, Any], broken: set[str], prefix: str = "") -> dict[str, Any]:
    kept = {}
    for name, value in node.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if path not in broken:
            kept[name] = _without(value, broken, path) if isinstance(value, Mapping) else value
    return kept
