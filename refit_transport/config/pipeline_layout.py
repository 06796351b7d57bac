"""Megatron-core's text for a pipeline layout, such as `Et*2|(tt|)*3,tL`: one letter a layer, `|` between stages."""

from __future__ import annotations

import re

STAGE_LAYERS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
STAGE_SHARES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Keys of ``policy.megatron_cfg`` that share out layers where there is no layout text."""

LETTERS = {"E": "embedding", "t": "decoder layer", "m": "prediction layer", "L": "loss"}


def stages_of(layout: str) -> list[str]:
    """The letters of every stage, virtual ones included, in the order of the pipeline. Commas mean nothing;
    ``(...)*n`` and ``x*n`` repeat."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|")
