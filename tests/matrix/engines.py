"""Engine layouts of the matrix: fused tensors as an inference engine stores them, and how it loads a checkpoint.

Two ways into the same tensors are written apart: ``load_checkpoint`` follows the engine's own loaders (chunks, narrows,
heads), ``sink_of`` follows the planner's layout rules (regions). A refit must leave what loading leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from refit_transport.engines.tensors import TensorSink
from refit_transport.layout.layout import SideDescription
from refit_transport.layout.region import Region
from refit_transport.planning.presets import Generation, describe_generation

from .policies import Policy

GUARD = -12345.0
"""What memory holds that no checkpoint tensor may write: padding rows of the vocabulary."""

ENGINES: dict[str, tuple[Generation, ...]] = {
    "TP 1": (Generation(),),
    "TP 2": (Generation(tp=2),),
    "TP 4": (Generation(tp=4),),
    "PP 2": (Generation(pp=2),),
    "TP 2 x PP 2": (Generation(tp=2, pp=2),),
    "DP 2": (Generation(dp=2),),
    "TP 2 x DP 2": (Generation(tp=2, dp=2),),
    "TP 2 and TP 1 and PP 2": (Generation(tp=2), Generation(), Generation(pp=2)),
    "TP 2 x EP 2": (Generation(tp=2, ep=2),),
    "DP 3 x EP 3 (uneven)": (Generation(dp=3, ep=3),),
    "TP 2 x DP 2 x EP 4": (Generation(tp=2, dp=2, ep=4),),
    "TP 4 x EP 4 and TP 2": (Generation(tp=4, ep=4), Generation(tp=2)),
}
"""Engines that are refitted together, in the order of their ranks."""

NEEDS_EXPERTS = frozenset(name for name in ENGINES if " EP " in name)

Tensors = dict[str, torch.Tensor]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True)
class Place:
    """Where a rank stands in its engine."""

    sizes: Generation
    replica: int
    stage: int
    tp: int

    @classmethod
    def of(cls, sizes: Generation, index: int) -> Place:
        replica, inside = divmod(index, sizes.tp * sizes.pp)
        return cls(sizes, replica, *divmod(inside, sizes.tp))

    def experts(self, count: int) -> list[int]:
        """Numbers of the experts that the rank holds: consecutive ones, the first ranks one more."""
        numbers = torch.arange(count)
        if self.sizes.ep > 1:
            number = (self.replica * self.sizes.tp + self.tp) % self.sizes.ep
            numbers = numbers.tensor_split(self.sizes.ep)[number]
        return numbers.tolist()


def load_checkpoint(
    policy: Policy, checkpoint: Mapping[str, torch.Tensor], place: Place, dtype: torch.dtype
) -> Tensors:
    """The rank's tensors after its engine loaded ``checkpoint`` from disk."""
    config, tp, t = policy.preset.config, place.sizes.tp, place.tp
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    per_stage = config["num_hidden_layers"] // place.sizes.pp
    first, last = place.stage == 0, place.stage == place.sizes.pp - 1

    def rows(name: str) -> torch.Tensor:
        return checkpoint[name].chunk(tp, 0)[t]

    def columns(name: str) -> torch.Tensor:
        return checkpoint[name].chunk(tp, 1)[t]

    def key_value(name: str) -> torch.Tensor:
        heads = checkpoint[name].unflatten(0, (kv_heads, dim))
        mine = heads.chunk(tp)[t] if kv_heads >= tp else heads[t // (tp // kv_heads)].unsqueeze(0)
        return mine.flatten(0, 1)

    def vocabulary(name: str) -> torch.Tensor:
        size, hidden = checkpoint[name].shape
        padded = torch.full((-(-size // 64) * 64, hidden), GUARD)
        padded[:size] = checkpoint[name]
        return padded.chunk(tp)[t]

    def expert(prefix: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        names = [f"{prefix}.{number}.{part}_proj.weight" for part in ("gate", "up", "down")]
        if place.sizes.ep > 1:
            return torch.cat([checkpoint[names[0]], checkpoint[names[1]]]), checkpoint[names[2]]
        return torch.cat([rows(names[0]), rows(names[1])]), columns(names[2])

    def layer(prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}{name}.weight", checkpoint[f"{prefix}{name}.weight"]
        query, keys = rows(attention + "q_proj.weight"), key_value(attention + "k_proj.weight")
        yield attention + "qkv_proj.weight", torch.cat([query, keys, key_value(attention + "v_proj.weight")])
        yield attention + "o_proj.weight", columns(attention + "o_proj.weight")
        if policy.has_experts:
            yield mlp + "gate.weight", checkpoint[mlp + "gate.weight"]
            held = [expert(mlp + "experts", number) for number in place.experts(config["num_experts"])]
            yield mlp + "experts.w13", torch.stack([w13 for w13, _ in held])
            yield mlp + "experts.w2", torch.stack([w2 for _, w2 in held])
        else:
            yield mlp + "gate_up_proj.weight", torch.cat([rows(mlp + "gate_proj.weight"), rows(mlp + "up_proj.weight")])
            yield mlp + "down_proj.weight", columns(mlp + "down_proj.weight")

    loaded: Tensors = {}
    if first or (last and config["tie_word_embeddings"]):
        loaded["model.embed_tokens.weight"] = vocabulary("model.embed_tokens.weight")
    for number in range(place.stage * per_stage, (place.stage + 1) * per_stage):
        loaded.update(layer(f"model.layers.{number}."))
    if last:
        loaded["model.norm.weight"] = checkpoint["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            loaded["lm_head.weight"] = vocabulary("lm_head.weight")
    return {name: tensor.to(dtype) for name, tensor in loaded.items()}


@dataclass
class EngineRank:
    """One inference rank of the matrix."""

    tensors: Tensors
    """Its memory: fused tensors, filled with ``GUARD`` before the first refit."""
    loaded: Tensors
    """The same tensors of an engine that loaded the trainer's checkpoint."""
    sink: TensorSink

    def wrong(self, sign: float = 1.0) -> list[str]:
        """Names of tensors whose bytes differ from the loaded ones (times ``sign``, their padding aside)."""
        return [name for name, tensor in self.tensors.items() if not _same(tensor, self.loaded[name], sign)]


def _same(tensor: torch.Tensor, loaded: torch.Tensor, sign: float) -> bool:
    padding = loaded == torch.tensor(GUARD, dtype=loaded.dtype)
    expected = torch.where(padding, loaded, loaded * sign)
    return torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def engine_ranks(policy: Policy, layout: str, dtype: torch.dtype) -> list[EngineRank]:
    """All ranks of the engines of ``layout``, which need what ``policy`` trains."""
    ranks = []
    for sizes in ENGINES[layout]:
        side = describe_generation(policy.preset, sizes)
        for index in range(sizes.world):
            place = Place.of(sizes, index)
            loaded = load_checkpoint(policy, policy.checkpoint, place, dtype)
            memory = {name: torch.full_like(tensor, GUARD) for name, tensor in loaded.items()}
            ranks.append(EngineRank(memory, loaded, sink_of(policy, side, place, index, memory)))
    return ranks


def sink_of(policy: Policy, side: SideDescription, place: Place, index: int, memory: Tensors) -> TensorSink:
    """A sink that writes the regions of rank ``index`` to their places in ``memory``."""
    local = {number: i for i, number in enumerate(place.experts(policy.preset.experts))}
    filled: dict[tuple[str, int], int] = {}
    holdings = {}
    for entry in sorted(side.entries, key=lambda entry: _order(entry.name)):
        regions = side.layout_of(entry).regions_of(index)
        if regions:
            target, item = _target(entry.name, local)
            tensor = memory[target] if item is None else memory[target][item]
            holdings[entry.name] = [(region, _next(tensor, region, filled, (target, item or 0))) for region in regions]
    return TensorSink(holdings)


def _next(
    tensor: torch.Tensor, region: Region, filled: dict[tuple[str, int], int], key: tuple[str, int]
) -> torch.Tensor:
    """The rows of ``tensor`` behind those that are taken already."""
    start = filled.get(key, 0)
    filled[key] = start + region.shape[0]
    return tensor[start : filled[key]]


def _order(name: str) -> int:
    """Parts of a fused tensor in the order in which it holds them."""
    return next((i for i, part in enumerate(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) if part in name), 9)


def _target(name: str, local: Mapping[int, int]) -> tuple[str, int | None]:
    """The fused tensor that holds a checkpoint tensor, and the expert's place in it."""
    if found := _EXPERT.fullmatch(name):
        prefix, number, part = found.groups()
        return f"{prefix}.{'w2' if part == 'down_proj' else 'w13'}", local[int(number)]
    name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name), None
