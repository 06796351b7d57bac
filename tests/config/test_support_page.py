"""The support matrix in the documentation is what validation allows today."""

from __future__ import annotations

import re
from pathlib import Path

from refit_transport.config.support import FAMILIES, UNSUPPORTED
from refit_transport.config.support_page import support_page


def test_the_support_page_is_current(repository: Path) -> None:
    written = (repository / "docs" / "support-matrix.md").read_text()
    assert written == support_page(), "run: python -m refit_transport.config.support_page docs/support-matrix.md"


def test_every_family_has_a_row_per_trainer_and_every_reason_leads_to_a_refusal() -> None:
    page = support_page()
    for family in FAMILIES:
        for kind in family.model_types:
            for trainer in ("DTensor", "Megatron"):
                assert f"`{kind}` | {trainer} |" in page
    refused = set(re.findall(r'<a id="([\w-]+)">', page))
    assert refused == {row.slug for row in UNSUPPORTED}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= refused


def test_cells_are_what_the_table_says() -> None:
    rows = {tuple(line.split(" | ")[1:3]): line for line in support_page().splitlines() if line.startswith("| ")}
    assert rows["`qwen3`", "DTensor"].count(" yes ") == 3
    assert "[GPU only](#megatron-latent-attention-on-cpu)" in rows["`deepseek_v3`", "Megatron"]
    assert "[plan only](#megatron-model)" in rows["`gpt_oss`", "Megatron"]
    assert next(line for line in support_page().splitlines() if "Megatron | PPO" in line).count(" yes ") == 3
