"""Makes the refits of ``tests/wires`` importable: the same cases run on a GPU here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "wires"))
