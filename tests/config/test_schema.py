"""The schema agrees with itself, with the documentation made from it, and with the models it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from refit_transport.config.check import select
from refit_transport.config.document import configuration_page
from refit_transport.config.foreign import FOREIGN
from refit_transport.config.keys import all_keys
from refit_transport.config.load import schema_defaults
from refit_transport.config.support import UNSUPPORTED, refused_table
from refit_transport.config.tiny_models import TINY_MODELS


def test_every_default_is_allowed() -> None:
    defaults = schema_defaults(("grpo", "ppo"))
    OmegaConf.update(defaults, "policy.model_name", "tiny/qwen3")
    plain = OmegaConf.to_container(defaults, resolve=True)
    refused = [path for path, key in all_keys().items() if not key.accepts(key.coerce(select(plain, path)))]
    assert refused == []


def test_no_key_is_both_known_and_foreign() -> None:
    assert not {path for path in all_keys() for prefix in FOREIGN if path == prefix or path.startswith(f"{prefix}.")}


def test_the_configuration_page_is_current(repository: Path) -> None:
    written = (repository / "docs/configuration.md").read_text()
    assert written == configuration_page(), "run: python -m refit_transport.config.document docs/configuration.md"


def test_every_link_into_the_page_leads_somewhere() -> None:
    page = configuration_page()
    anchors = set(re.findall(r'id="([^"]+)"', page))
    anchors |= {line.lstrip("# ").lower().replace(" ", "-") for line in page.splitlines() if line.startswith("#")}
    wanted = {key.anchor for key in all_keys().values()} | {row.anchor for row in UNSUPPORTED}
    wanted |= {
        f"docs/configuration.md#{name}" for name in ("layouts", "batches", "loss", "not-supported", "data", "env")
    }
    assert {anchor.partition("#")[2] for anchor in wanted} <= anchors


def test_the_configuration_page_names_what_validation_refuses() -> None:
    table = refused_table()
    assert all(row.combination in table and f'<a id="{row.slug}">' in table for row in UNSUPPORTED)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_built_in_models_are_described_as_they_are_made(name: str) -> None:
    tiny_model = pytest.importorskip("refit_transport.rl.tasks.tiny_model")
    made = {**tiny_model.SHAPE, **(tiny_model.MOE_SHAPE if "moe" in name else {})}
    described = TINY_MODELS[name]
    shared = set(made) & set(described)
    assert len(shared) >= 8
    assert {key: described[key] for key in shared} == {key: made[key] for key in shared}
