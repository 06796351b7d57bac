"""Writes `docs/support-matrix.md` from the table of refused combinations that validation reads.

``python -m refit_transport.config.support_page docs/support-matrix.md`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from refit_transport.config.load import schema_defaults
from refit_transport.config.model_facts import ModelFacts
from refit_transport.config.setup import Setup
from refit_transport.config.support import FAMILIES, GENERATION, UNSUPPORTED, Family, Unsupported

PATHS = (("nccl_reshard", "ffn"), ("nccl_reshard", "all"), ("gather_broadcast", None))
TRAINERS = ("DTensor", "Megatron")
ALGORITHMS = ("GRPO", "PPO")
DEVICES = ("cpu", "cuda")

HEAD = """# Support matrix

This page is made from the table that validates configurations:
`python -m refit_transport.config.support_page docs/support-matrix.md`.

A cell says what happens to a recipe of that row, and links to the reason when it is not *yes*:

- **yes**: it is planned and runs.
- **GPU only**: it runs with `cluster.device: cuda`, and is refused with `cpu`.
- **plan only**: `refit-transport plan` and `validate` accept it; starting it is refused.
- **no**: refused before anything starts.

The engine is vLLM in every row, with tensor, pipeline, expert and data parallelism, and any number of engines, also of
different shapes at once. A trainer or an engine of one's own takes part through the protocols in
[Own trainers and engines](adapters.md).
"""

LAYOUTS = """## Layouts

Every trainer layout reaches every engine layout, on every path. `tests/matrix` runs all pairs of these with tiny models
and compares each inference rank, byte for byte, with an engine that loaded the trainers' checkpoint. There DTensors are
real ones, Megatron's layouts follow the planner's rules, and the engine is a stand-in with vLLM's fused tensors; real
Megatron-core models are in `tests/megatron`, real vLLM engines in `tests/engines`.

| side | layouts | read from |
|---|---|---|
| DTensor trainer | FSDP2, HSDP, TP x FSDP2, EP x FSDP2; uneven and empty shards | live DTensors |
| Megatron trainer | TP, PP, VPP, EP, ETP, DP | live parameters and process groups |
| vLLM engine | TP, also with more ranks than key-value heads; PP; EP over TP or DP x TP, also uneven | vLLM's loaders |
| several engines | of equal or different shapes, at once | |
| vLLM's draft model | multi-token prediction, EAGLE, a model of its own; what nobody sends is named | its loaders |
"""


@dataclass(frozen=True)
class _Row(Setup):
    """A recipe of one row of the page, whose model is described here instead of read from a file."""

    facts: ModelFacts | None = None

    @property
    def model(self) -> ModelFacts | None:
        return self.facts


def support_page() -> str:
    """The whole page as Markdown."""
    parts = (HEAD, *_algorithms(), *_families(), LAYOUTS, *_refused())
    return "\n".join(parts)


def _algorithms() -> Iterator[str]:
    yield "## Trainers and algorithms"
    yield ""
    yield from _header("trainer", "algorithm")
    for trainer in TRAINERS:
        for algorithm in ALGORITHMS:
            yield f"| {trainer} | {algorithm} | " + " | ".join(_cells(trainer, algorithm, None)) + " |"
    yield ""


def _families() -> Iterator[str]:
    yield "## Families"
    yield ""
    yield "With GRPO. The last column goes shard to shard with `scope: ffn`; the rest is gathered and broadcast."
    yield ""
    yield from _header("family", "`model_type`", "trainer", last="shard to shard with scope `ffn`")
    for family in FAMILIES:
        for kind in family.model_types:
            for with_experts, label in _forms(family):
                facts = ModelFacts(kind, 2, 4, 2, 64, 8 if with_experts else 0, 64)
                for trainer in TRAINERS:
                    cells = " | ".join(_cells(trainer, "GRPO", facts))
                    yield f"| {family.name}{label} | `{kind}` | {trainer} | {cells} | {family.feed_forward} |"
    yield ""
    yield "The tests refit a running engine of each family on CPU and compare it with a fresh one, except these:"
    yield ""
    for family in FAMILIES:
        if family.no_engine:
            yield f"- {family.name}: {family.no_engine}."
        if not family.expert_model_on_cpu:
            yield f"- {family.name} with experts: [no kernel on CPU](#experts-without-cpu-kernel)."
    yield ""


def _forms(family: Family) -> tuple[tuple[bool, str], ...]:
    """Whether models of the family have experts, and what to add to its name; both where its experts are special."""
    if not family.expert_model_on_cpu:
        return (False, ""), (True, " with experts")
    return (("expert" in family.feed_forward, ""),)


def _header(*first: str, last: str = "") -> Iterator[str]:
    names = [f"`{name}`" + (f", scope `{scope}`" if scope else "") for name, scope in PATHS]
    columns = [*first, *names, *([last] if last else [])]
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"


def _cells(trainer: str, algorithm: str, facts: ModelFacts | None) -> list[str]:
    return [_cell(trainer.lower(), algorithm.lower(), transport, scope, facts) for transport, scope in PATHS]


def _cell(trainer: str, algorithm: str, transport: str, scope: str | None, facts: ModelFacts | None) -> str:
    on_cpu, on_gpu = (_refusal(trainer, algorithm, transport, scope, facts, device) for device in DEVICES)
    if on_gpu is not None:
        return f"[{'plan only' if on_gpu.only_to_run else 'no'}](#{on_gpu.slug})"
    return "yes" if on_cpu is None else f"[GPU only](#{on_cpu.slug})"


def _refusal(
    trainer: str, algorithm: str, transport: str, scope: str | None, facts: ModelFacts | None, device: str
) -> Unsupported | None:
    """The row of the table that refuses most, of those that apply."""
    config = schema_defaults((algorithm,))
    changes = {
        "cluster.device": device,
        "policy.model_name": "",
        "policy.dtensor_cfg.enabled": trainer == "dtensor",
        "policy.megatron_cfg.enabled": trainer == "megatron",
        f"{GENERATION}.colocated.enabled": False,
        f"{GENERATION}.refit_transport": None if transport == "gather_broadcast" else transport,
    }
    if scope:
        changes[f"{GENERATION}.refit_cfg.{transport}.scope"] = scope
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    setup = _Row(OmegaConf.to_container(config, resolve=True), facts=facts)  # type: ignore[arg-type]
    refused = sorted((row for row in UNSUPPORTED if row.applies(setup)), key=lambda row: row.only_to_run)
    return refused[0] if refused else None


def _refused() -> Iterator[str]:
    yield "## What is refused"
    yield ""
    yield "| refused | when | why | set |"
    yield "|---|---|---|---|"
    for row in UNSUPPORTED:
        when = "starting" if row.only_to_run else "always"
        yield f'| <a id="{row.slug}"></a>{row.combination} | {when} | {row.why} | `{row.key}`: {row.allowed} |'
    yield ""


def main(path: str) -> None:
    """Write the page."""
    Path(path).write_text(support_page())


if __name__ == "__main__":
    main(sys.argv[1])
