"""Vision towers are refitted with their decoder. Idefics3 runs in a real engine, in ``test_families.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_vision import write_stand_in

from tests.models import make_model

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def test_every_tensor_of_qwen_2_5_vl_is_written_with_the_right_bytes(tmp_path):
    paths = [str(make_model("qwen2_5_vl", tmp_path / which, seed)) for seed, which in enumerate("ab")]
    write_stand_in(tmp_path / "stand-in")
    result = subprocess.run(
        [sys.executable, "-m", "tests.engines.recorded_vision", *paths, str(tmp_path / "found.json")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'stand-in'}:{ROOT}", "VLLM_DIST_IDENT": tmp_path.name},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["model"] == "vllm.model_executor.models.qwen2_5_vl"
    assert found["wrong"] == []
    assert found["direct"] == found["sent"]
    for part in ("visual.blocks.0.", "visual.patch_embed.", "visual.merger.", "language_model.model.layers.1."):
        assert any(path.startswith(part) for path in found["changed"]), part
