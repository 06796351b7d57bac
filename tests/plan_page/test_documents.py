"""The planning pages say what the code does: drawn examples, reference table, links, options and JSON keys."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from refit_transport.planning.plan import PlanOptions
from refit_transport.planning.presets.clusters import CLUSTERS
from refit_transport.planning.presets.models import MODELS
from refit_transport.planning.presets.parallel import Generation, Training
from refit_transport.report.plan_json import summary
from refit_transport.report.plan_reference import layer_sheet
from refit_transport.report.plan_study import Job, study

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = runpy.run_path(str(DOCS / "assets" / "draw_examples.py"))["EXAMPLES"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_drawn_examples_are_what_the_planner_plans(name: str) -> None:
    assert (DOCS / "assets" / name).read_text(encoding="utf-8") == EXAMPLES[name]()


def test_the_example_crosses_the_network_four_times_against_eight() -> None:
    drawn = (DOCS / "assets" / "example-once-per-domain.svg").read_text(encoding="utf-8")
    assert re.findall(r": (\d) network transfers", drawn) == ["4", "8"]


def test_the_layer_table_in_the_documentation_is_the_computed_one() -> None:
    assert layer_sheet().markdown().strip() in (DOCS / "planning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["planning.md", "plan-page.md"])
def test_links_between_the_pages_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (DOCS / page).read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target


def test_every_json_key_is_documented() -> None:
    job = Job(MODELS["qwen3-0.6b"], Training(), Generation(), CLUSTERS["cpu-host"], options=PlanOptions())
    figures = summary(study(job, ("all",), broadcast=False))["transports"]["nccl_reshard"]["all"]
    text = (DOCS / "plan-page.md").read_text(encoding="utf-8")
    assert [key for key in figures if f"`{key}`" not in text and key != "bound"] == []
