"""Which checkpoint tensors are feed-forward projections of the decoder, and so take the reshard path. Pure.

Decided from structure: a projection is one of a set (gate, up, down; or up, down) under one parent, in a layer of the
stack that stands beside the token embedding. A name that merely ends like one is not enough.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from refit_transport.layout.layout import ITEMSIZE, LogicalParameter
from refit_transport.planning.plan import Route


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one tensor travels, and why."""

    route: Route
    kind: str
    """What the tensor is: ``dense``, ``expert``, ``shared expert``, ``stacked experts``, ``attention``, ``norm`` ..."""
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the summary: all tensors of one kind."""

    route: Route
    kind: str
    reason: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Classification:
    """A verdict per tensor name, in the order given."""

    verdicts: Mapping[str, Verdict]

    @property
    def reshard(self) -> frozenset[str]:
        """Names of the feed-forward projections."""
        return frozenset(name for name, verdict in self.verdicts.items() if verdict.route is Route.RESHARD)

    def rows(self, parameters: Iterable[LogicalParameter]) -> list[Row]:
        """Totals by route and kind, reshard path first, largest first."""
        totals: dict[Verdict, Counter[str]] = defaultdict(Counter)
        for parameter in parameters:
            elements = prod(parameter.shape)
            totals[self.verdicts[parameter.name]].update(
                tensors=1, elements=elements, bytes=elements * ITEMSIZE[parameter.dtype]
            )
        rows = [Row(v.route, v.kind, v.reason, t["tensors"], t["elements"], t["bytes"]) for v, t in totals.items()]
        return sorted(rows, key=lambda row: (row.route, -row.bytes, row.kind, row.reason))


def classify(parameters: Iterable[str | LogicalParameter]) -> Classification:
    """A verdict for every checkpoint tensor of a model. Give all of the model's tensors: neighbours decide. Names alone
    will do; shapes rule out tensors that are no matrices. Takes time linear in the number of names."""
    shapes = {p if isinstance(p, str) else p.name: None if isinstance(p, str) else p.shape for p in parameters}
    places = {name: _place(name) for name in shapes}
    decoders = _decoder_stacks(places.values())
    mtp_layers = {place.layer for place in places.values() if place.inside and place.inside[0] in _MTP_MEMBERS}
    projection_sets = _projection_sets(places.values())
    verdicts = {}
    for name, place in places.items():
        outside = _outside_decoder(place, decoders, mtp_layers)
        inside = _projection_set(place, projection_sets)
        if outside:
            verdicts[name] = outside
        elif inside:
            verdicts[name] = _as_projection(place, shapes[name], inside)
        else:
            verdicts[name] = _other(place)
    return Classification(verdicts)


class _Place(NamedTuple):
    """A name taken apart: ``model.layers.3.mlp.experts.7.up_proj.weight`` is ``up_proj`` of parent
    ``model.layers.3.mlp.experts.7``, in layer ``model.layers.3`` of stack ``model.layers``. Outside of layers,
    ``stack`` and ``layer`` are empty and ``inside`` is the whole name."""

    stack: str
    layer: str
    inside: tuple[str, ...]
    """What follows the layer: ``(mlp, experts, 7, up_proj, weight)``."""
    parent: str
    projection: str
    has_suffix: bool
    """Pre-stacked experts are parameters of their own; everything else has its ``weight`` below a module."""


_IN_LAYER = re.compile(r"(?P<layer>(?P<stack>(?:.*?\.)??(?:layers|blocks|block|layer|h))\.\d+)\.(?P<rest>.+)")
_SUFFIXES = frozenset(
    {"weight", "bias", "weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale", "scales", "weight_packed"}
)
_EMBEDDINGS = frozenset({"embed_tokens", "embeddings", "word_embeddings", "tok_embeddings", "wte", "embed_in"})
_HEADS = frozenset({"lm_head", "embed_out", "output"})
_TOWERS = frozenset({"visual", "vision", "vision_tower", "vision_model", "vision_encoder", "image_encoder"})
_OTHER_TOWERS = frozenset({"audio", "audio_tower", "audio_encoder", "speech_encoder", "talker", "code2wav"})
_PREDICTORS = frozenset({"mtp", "mtp_block", "mtp_layers", "draft", "draft_model", "eagle", "medusa"})
_MTP_MEMBERS = frozenset({"eh_proj", "enorm", "hnorm", "shared_head", "mtp_block"})
_ATTENTION = frozenset({"self_attn", "attn", "attention", "self_attention", "cross_attn", "indexer"})
_ATTENTION_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "sinks"})
_STATE_SPACE = frozenset({"linear_attn", "mamba", "A_log", "D", "dt_bias", "conv1d", "in_proj", "out_proj"})
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "e_score_correction_bias", "expert_bias"})

_SETS: tuple[frozenset[str], ...] = tuple(
    frozenset(names)
    for names in (
        ("gate_proj", "up_proj", "down_proj"),
        ("w1", "w2", "w3"),
        ("gate_up_proj", "down_proj"),
        ("up_proj", "down_proj"),
        ("w13", "w2"),
        ("w1", "w2"),
        ("fc1", "fc2"),
        ("c_fc", "c_proj"),
        ("linear_fc1", "linear_fc2"),
        ("dense_h_to_4h", "dense_4h_to_h"),
        ("input_linear", "output_linear"),
    )
)
"""Complete sets of projections, gated ones before the non-gated ones that they contain."""

_ALL_PROJECTIONS = frozenset().union(*_SETS)


def _place(name: str) -> _Place:
    found = _IN_LAYER.match(name)
    stack, layer, rest = (found["stack"], found["layer"], found["rest"]) if found else ("", "", name)
    inside = tuple(rest.split("."))
    has_suffix = inside[-1] in _SUFFIXES
    owner = name[: -len(inside[-1]) - 1] if has_suffix else name
    parent, _, projection = owner.rpartition(".")
    return _Place(stack, layer, inside, parent, projection, has_suffix)


def _decoder_stacks(places: Iterable[_Place]) -> frozenset[str]:
    """Stacks beside a token embedding; all of them when none is, as on a rank that holds a later pipeline stage."""
    stacks, embedded = set(), set()
    for place in places:
        if place.stack:
            stacks.add(place.stack)
        elif len(place.inside) >= 2 and place.inside[-2] in _EMBEDDINGS:
            embedded.add(place.inside[:-2])
    beside = {stack for stack in stacks if tuple(stack.split(".")[:-1]) in embedded}
    return frozenset(beside or stacks)


def _projection_sets(places: Iterable[_Place]) -> dict[str, frozenset[str]]:
    """Parent to the complete set of projections that it holds."""
    held: dict[str, set[str]] = defaultdict(set)
    for place in places:
        if place.layer and place.projection in _ALL_PROJECTIONS:
            held[place.parent].add(place.projection)
    complete = {}
    for parent, names in held.items():
        found = next((wanted for wanted in _SETS if wanted <= names), None)
        if found:
            complete[parent] = found
    return complete


def _projection_set(place: _Place, complete: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    """The set that this tensor belongs to. A bias or scale of pre-stacked experts (``gate_up_proj_bias``) stands beside
    the projection and belongs to its set too."""
    if not place.layer:
        return None
    members = complete.get(place.parent)
    if members and (place.projection in members or place.projection.startswith(tuple(f"{m}_" for m in members))):
        return members
    return None


def _outside_decoder(place: _Place, decoders: frozenset[str], mtp_layers: set[str]) -> Verdict | None:
    words = set((place.stack or ".".join(place.inside)).split("."))
    if words & _PREDICTORS or (place.layer and place.layer in mtp_layers):
        return _MTP
    if words & _TOWERS:
        return _VISION
    if words & _OTHER_TOWERS:
        return _TOWER
    if place.stack and place.stack not in decoders:
        return _FOREIGN_STACK
    return None


def _as_projection(place: _Place, shape: tuple[int, ...] | None, members: frozenset[str]) -> Verdict:
    """A member of a projection set in a decoder layer: its matrices are resharded, what belongs to them is not."""
    last = place.inside[-1]
    if "bias" in last:
        return _BIAS
    if last not in ("weight", *members):
        return _quantised(last)
    if set(place.inside[:-1]) & _ATTENTION:
        return _ATTENTION_VERDICT
    if shape is not None and len(shape) not in (2, 3):
        return _NO_MATRIX
    return _FEED_FORWARD[_feed_forward_kind(place, shape)]


def _feed_forward_kind(place: _Place, shape: tuple[int, ...] | None) -> str:
    parents = place.inside[: -1 - place.has_suffix]
    if any("shared" in word for word in parents):
        return "shared expert"
    if parents and parents[-1].isdigit():
        return "expert"
    stacked = len(shape) == 3 if shape is not None else bool(parents) and parents[-1] == "experts"
    return "stacked experts" if stacked else "dense"


def _other(place: _Place) -> Verdict:
    """What is neither outside the decoder nor of a complete set of projections."""
    words = set(place.inside)
    last_module = place.projection
    if last_module.endswith("_bias") and last_module.removesuffix("_bias") in _ALL_PROJECTIONS:
        return _BIAS
    if place.inside[-1] in _SUFFIXES - {"weight", "bias"} or last_module.endswith(("_blocks", "_scales")):
        return _quantised(place.inside[-1])
    if words & _ROUTERS:
        return _ROUTER
    if "norm" in last_module or last_module.startswith("ln_") or "layernorm" in last_module:
        return _NORM
    if words & _ATTENTION or words & _ATTENTION_PROJECTIONS:
        return _ATTENTION_VERDICT
    if words & _STATE_SPACE:
        return _STATE
    if not place.layer and words & _EMBEDDINGS:
        return _EMBEDDING
    if not place.layer and words & _HEADS:
        return _HEAD
    return _INCOMPLETE if last_module in _ALL_PROJECTIONS else _REST


def _quantised(last: str) -> Verdict:
    return _BLOCKS if "blocks" in last or "packed" in last else _SCALE


def _broadcast(kind: str, reason: str) -> Verdict:
    return Verdict(Route.BROADCAST, kind, reason)


_FEED_FORWARD = {
    kind: Verdict(Route.RESHARD, kind, reason)
    for kind, reason in (
        ("dense", "projection of a complete feed-forward set"),
        ("expert", "projection of a complete set of one expert"),
        ("shared expert", "projection of a complete set of a shared expert"),
        ("stacked experts", "projection of a complete set, all experts in one tensor"),
    )
}
PREDICTION = "multi-token prediction"
"""The kind of what only a draft model needs."""

_MTP = _broadcast(PREDICTION, "of a draft, not of the decoder; left out where no engine drafts with it")
_VISION = _broadcast("vision tower", "not part of the decoder")
_TOWER = _broadcast("other tower", "not part of the decoder")
_FOREIGN_STACK = _broadcast("other stack", "its layers do not stand beside the token embedding")
_BIAS = _broadcast("feed-forward bias", "too small to be worth resharding")
_SCALE = _broadcast("quantisation scale", "belongs to whole blocks of its weight")
_BLOCKS = _broadcast("quantised blocks", "packed values, not a matrix of one dtype")
_NO_MATRIX = _broadcast("other", "named like a projection, but neither a matrix nor a stack of matrices")
_INCOMPLETE = _broadcast("other", "named like a projection, but its set is not complete under one parent")
_ROUTER = _broadcast("router", "small and needed whole")
_NORM = _broadcast("norm", "small and needed whole")
_ATTENTION_VERDICT = _broadcast("attention", "attention weights are gathered with scope ffn")
_STATE = _broadcast("state space or linear attention", "bands that shard separately")
_EMBEDDING = _broadcast("embedding", "the vocabulary may be padded or tied")
_HEAD = _broadcast("head", "the vocabulary may be padded or tied")
_REST = _broadcast("other", "not a feed-forward projection")
