"""The plan page as a browser draws it: complete, self-contained, readable on a laptop in light and dark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from refit_transport.planning.plan import PlanOptions
from refit_transport.planning.presets.clusters import CLUSTERS
from refit_transport.planning.presets.models import MODELS
from refit_transport.planning.presets.parallel import Generation, Training
from refit_transport.report.plan_json import heat_map, page_data, timeline
from refit_transport.report.plan_page import render, write_page
from refit_transport.report.plan_study import Job, Study, study

from .browser import CHROMIUM, Drawn, draw, screenshot

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def small() -> Study:
    return study(Job(MODELS["qwen3-0.6b"], Training(tp=2, pp=2, dp=2), Generation(tp=4, dp=2), CLUSTERS["dgx-h100"],
                     options=PlanOptions(bucket_bytes=64 << 20)))  # fmt: skip


@pytest.fixture(scope="module")
def page(small: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(small, tmp_path_factory.mktemp("page") / "deep" / "plan.html")


@pytest.fixture(scope="module")
def drawn(page: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    """The page with each of its three outcomes chosen."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    return [draw(page, tmp_path_factory.mktemp("browser"), f"#{number}") for number in range(3)]


def _elements(dom: str, name: str) -> list[str]:
    return re.findall(rf'<[^>]*class="{name}"[^>]*>', dom)


def test_the_page_names_no_address_outside_itself(small: Study) -> None:
    text = re.sub(r"http://www\.w3\.org/2000/svg", "", render(small))
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)[^"')\s]""", text.split('id="data"')[0])
    assert "http" not in text.replace("http-equiv", "")


def test_every_outcome_is_drawn_in_full(small: Study, drawn: list[Drawn]) -> None:
    for outcome, shown in zip(small.outcomes, drawn, strict=True):
        heat, lanes = heat_map(small.job, outcome), timeline(outcome)["lanes"]
        assert len(_elements(shown.dom, "heat-cell")) == len(heat["cells"]) > 0
        assert len(_elements(shown.dom, "span")) == sum(len(spans) for spans in lanes.values()) > 0
        assert len(_elements(shown.dom, "bar")) == len(small.outcomes) * (1 + 3)
        assert re.findall(r'<button[^>]*aria-checked="true"[^>]*>([^<]*)', shown.dom) == [outcome.title]


def test_the_heat_map_shows_the_bytes_of_the_plan(small: Study, drawn: list[Drawn]) -> None:
    tips = [re.search(r'data-tip="([^"]*)"', cell) for cell in _elements(drawn[0].dom, "heat-cell")]
    cells = heat_map(small.job, small.main)["cells"]
    assert sum("in-domain:" in tip.group(1) for tip in tips if tip) == sum(cell[3] > 0 for cell in cells)
    total = sum(sum(cell[2:]) for cell in cells)
    p = small.main.prediction
    assert total == pytest.approx(p.network_bytes + p.domain_bytes + p.local_bytes, abs=len(cells))


def test_the_headline_and_the_tables_show_the_figures_of_the_json(small: Study, drawn: list[Drawn]) -> None:
    data = page_data(small)
    visible = re.sub(r"<script.*?</script>", "", drawn[0].dom, flags=re.S)
    main = data["transports"]["nccl_reshard"]["ffn"]
    for text in (f"{main['messages']:,}", f"{main['busiest_recv_over_mean']:.3f}", data["digest"], main["limited_by"],
                 main["busiest_senders"][0]["place"]):  # fmt: skip
        assert text in visible, text
    milliseconds = main["predicted_seconds"] * 1e3
    assert f"{milliseconds:.{2 if milliseconds < 10 else 1}f} ms" in visible
    for note in data["assumptions"]:
        assert note in visible


def test_nothing_is_logged_and_nothing_is_fetched(drawn: list[Drawn]) -> None:
    for shown in drawn:
        assert shown.console == []
        assert shown.requests == set()


@needs_browser
def test_a_page_that_did_fetch_or_fail_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>missing()</script>')
    shown = draw(page, tmp_path)
    assert shown.requests == {"http://127.0.0.1:9/x.png"}
    assert any("missing is not defined" in line for line in shown.console)


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_laptop_screen_shows_heat_map_and_time_line_in_both_themes(page: Path, tmp_path: Path, dark: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    shot = screenshot(page, tmp_path, tmp_path / "shot.png", dark=dark)
    pixels = np.asarray(image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (768, 1366, 3)
    assert tuple(pixels[3, 3]) == ((0x12, 0x16, 0x1C) if dark else (0xF4, 0xF5, 0xF7))
    blue, amber = pixels[..., 2] - pixels[..., 0] > 40, pixels[..., 0] - pixels[..., 2] > 40
    heat, right = slice(0, 660), slice(660, None)
    assert blue[:, heat].sum() > 20_000, "the network part of the heat map"
    assert amber[:, heat].sum() > 10_000, "the in-domain part of the heat map"
    assert blue[:, right].sum() > 1_000, "the network lane of the time line"


def test_more_than_128_blocks_of_ranks_are_drawn_together() -> None:
    job = Job(MODELS["qwen3-0.6b"], Training(tp=1, dp=96), Generation(tp=2, dp=48), CLUSTERS["dgx-gb200"])
    heat = heat_map(job, study(job, ("all",), broadcast=False).main)
    assert heat["block_ranks"] == 2
    assert max(len(heat["rows"]), len(heat["columns"])) <= 128
    assert {row["side"] for row in heat["rows"]} >= {"trainer"}


def test_many_buckets_share_a_bar(small: Study) -> None:
    assert json.loads(json.dumps(page_data(small))) == page_data(small)
    for outcome in small.outcomes:
        bars = timeline(outcome)
        assert max(len(lane) for lane in bars["lanes"].values()) <= 160
        busy = sum(spent for _, _, spent in bars["lanes"]["network"])
        spans = outcome.prediction.timeline[:, 1]
        assert busy == pytest.approx(float((spans[:, 1] - spans[:, 0]).sum()), rel=1e-4)
