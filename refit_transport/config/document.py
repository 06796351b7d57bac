"""Writes `docs/configuration.md` from the schema, so that the documentation cannot disagree with what is checked.

``python -m refit_transport.config.document docs/configuration.md`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from refit_transport.config.foreign import FOREIGN
from refit_transport.config.key import REQUIRED, Key, Section, anchor_id, as_yaml
from refit_transport.config.keys import SECTIONS
from refit_transport.config.support import refused_table

HEAD = """# Configuration

This page is made from the schema: `python -m refit_transport.config.document docs/configuration.md`.

A configuration is YAML. A recipe names what it extends under `defaults`, a path or a list of paths relative to the
recipe; later ones win, and the recipe wins over all of them. `key=value` on the command line wins over everything.
Values may point at others with `${policy.precision}`. The resolved configuration is saved as `config.yaml` in the run's
folder.

```yaml
defaults: ../configs/grpo.yaml
policy:
  model_name: /models/Qwen3-4B
  generation:
    refit_transport: nccl_reshard
    colocated:
      enabled: false
      resources: {gpus_per_node: 4}
```

`refit-transport validate RECIPE [key=value ...]` reports everything that is wrong at once, one line each, in less than
a second. The same check runs before every run.
"""

RULES = """## Rules between keys

### Layouts

`cluster.num_nodes` x `cluster.gpus_per_node` ranks are shared out: `policy.generation.colocated.resources` says how
many generate, the others train. One node gives `gpus_per_node` of its own; several nodes give `num_nodes` whole nodes.

- One engine spans data x tensor x pipeline parallel ranks, where data = expert / tensor parallel size if experts are
  spread. Engines fill the ranks that generate: equal ones, or those that `policy.generation.replicas` lists.
- The trainer's tensor x pipeline (DTensor: tensor x replicas) and expert x expert-tensor x pipeline sizes divide the
  ranks that train.
- Tensor parallelism divides attention heads and feed-forward columns on both sides. Key-value heads: the DTensor
  trainer divides them; vLLM and Megatron also replicate them when there are fewer heads than ranks.
- Expert parallelism divides the number of experts in the trainer. In the engine it does not exceed it, and is 1 or a
  multiple of tensor parallelism.
- Megatron's equal stages (or chunks) divide the layers that no other key assigns. A layout text has the stages of all
  ranks, every layer once, and no other key beside it assigns layers.
- The critic's sizes (`value.dtensor_cfg`) keep the DTensor trainer's rules. Made of the policy's checkpoint, it has its
  `hf_config_overrides`.

Sizes are read from the model's `config.json`; they are not checked where that file is not on the machine.

### Batches

- `train_global_batch_size` divides the answers of a step: prompts x answers per prompt.
- `train_micro_batch_size` x data-parallel ranks divides `train_global_batch_size`.
- The engine's `max_model_len` holds `policy.max_total_sequence_length`.
- Advantages relative to a group need two answers per prompt.

### Loss

- `sequence_level_importance_ratios` needs `token_level_loss: false`.
- `use_cispo` needs `token_level_loss: true` and excludes `disable_ppo_ratio`, `force_on_policy_ratio`,
  `sequence_level_importance_ratios` and `ratio_clip_c`.
- `disable_ppo_ratio` excludes `force_on_policy_ratio` and `sequence_level_importance_ratios`.
- `truncated_importance_sampling_type` needs `use_importance_sampling_correction` and a ratio; `icepop` and
  `seq-mask-tis` need a lower bound as well; `seq-mask-tis` excludes `sequence_level_importance_ratios`.

## Support

Trainers, algorithms and model families are on [a page of their own](support-matrix.md). These combinations are refused:
"""


def configuration_page() -> str:
    """The whole page as Markdown."""
    return "\n".join((HEAD, "## Keys", "", *_keys(), RULES, refused_table(), "", *_foreign()))


def _keys() -> Iterator[str]:
    for part in SECTIONS:
        yield from _section(part)


def _section(part: Section) -> Iterator[str]:
    yield f'### <a id="{anchor_id(part.prefix)}"></a>{part.title}'
    yield ""
    yield f"`{part.prefix}.*`: {part.meaning}"
    yield ""
    yield "| key | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for key in part.keys:
        yield _row(key, part.prefix)
    yield ""


def _row(key: Key, prefix: str) -> str:
    name = key.path.removeprefix(f"{prefix}.")
    default = "*required*" if key.default == REQUIRED else f"`{as_yaml(key.default)}`"
    allowed = key.allowed().replace("|", "\\|")
    return f'| <a id="{anchor_id(key.path)}"></a>`{name}` | {default} | {allowed} | {key.meaning} |'


def _foreign() -> Iterator[str]:
    yield "## Not supported"
    yield ""
    yield "Keys of other frameworks that this project does not have. Switched off (`null`, `false`, `enabled: false`)"
    yield "they are ignored, so that copied files need no pruning; otherwise they are an error."
    yield ""
    yield "| key | instead |"
    yield "|---|---|"
    for path, instead in FOREIGN.items():
        yield f"| `{path}` | {instead} |"
    yield ""


def main(path: str) -> None:
    """Write the page."""
    Path(path).write_text(configuration_page())


if __name__ == "__main__":
    main(sys.argv[1])
