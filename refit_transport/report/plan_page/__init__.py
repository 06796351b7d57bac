"""A study as one self-contained HTML page: data, style and script inline, nothing fetched."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

from refit_transport.report.plan_json import page_data
from refit_transport.report.plan_study import Study


def write_page(study: Study, path: str | Path) -> Path:
    """Write the page of ``study`` to ``path``, whose folder is made if missing, and return it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(study), encoding="utf-8")
    return target


def render(study: Study) -> str:
    """The page's text."""
    folder = files(__package__)
    job = study.job
    title = f"Refit plan: {job.model.name}, {job.training} to {job.generation}, {job.cluster.name}"
    # "</" would end the script element that carries the data.
    data = json.dumps(page_data(study), separators=(",", ":")).replace("</", "<\\/")
    page = folder.joinpath("page.html").read_text("utf-8")
    parts = {
        "TITLE": escape(title),
        "STYLE": folder.joinpath("page.css").read_text("utf-8"),
        "SCRIPT": "\n".join(folder.joinpath(name).read_text("utf-8") for name in ("units.js", "charts.js", "page.js")),
        "DATA": data,
    }
    for name, text in parts.items():
        page = page.replace(f"%{name}%", text, 1)
    return page
