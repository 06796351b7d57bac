"""Rules on ranks and parallel sizes: what does not fit the cluster, and what does not divide the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from refit_transport.config.engine_shape import EngineShape
from refit_transport.config.key import DOCUMENT
from refit_transport.config.model_facts import ModelFacts
from refit_transport.config.pipeline_layout import LETTERS, STAGE_LAYERS, STAGE_SHARES, stages_of
from refit_transport.config.setup import Setup
from refit_transport.config.violation import Violation

VLLM = "policy.generation.vllm_cfg"
REPLICAS = "policy.generation.replicas"
MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
EXPERT = f"{DTENSOR}.expert_parallel_size"
VALUE = "value.dtensor_cfg"
RESOURCES = "policy.generation.colocated.resources"
ANCHOR = f"{DOCUMENT}#layouts"

Found = Iterator[Violation]


def layout_rules(setup: Setup) -> Found:
    """Violations of every rule on ranks and sizes."""
    for rule in _RULES:
        yield from rule(setup)


def _cluster_is_large_enough(setup: Setup) -> Found:
    real = setup.cluster
    if real is None:
        return
    for key, found, there in (
        ("cluster.num_nodes", setup.get("cluster.num_nodes"), real.nodes),
        ("cluster.gpus_per_node", setup.get("cluster.gpus_per_node"), real.gpus_per_node),
    ):
        if found > there:
            yield Violation(key, found, f"at most {there}, which is what this cluster has", ANCHOR)


def _generation_leaves_trainers(setup: Setup) -> Found:
    if setup.colocated:
        return
    key = f"{RESOURCES}.{'gpus_per_node' if setup.get('cluster.num_nodes') == 1 else 'num_nodes'}"
    given = setup.generation_ranks
    if given == 0:
        yield Violation(key, None, f"how much of the cluster's {setup.world} ranks generates", ANCHOR)
    elif given >= setup.world:
        yield Violation(
            key,
            setup.get(key),
            f"fewer than all: {given} ranks generate, which leaves {setup.world - given} of {setup.world} to train",
            ANCHOR,
        )


def _engines_fill_their_ranks(setup: Setup) -> Found:
    given, engine = setup.generation_ranks, setup.engine_shape.ranks
    if setup.colocated or not given or REPLICAS in setup.broken:
        return
    if setup.get(REPLICAS) is not None:
        taken = [shape.ranks for shape in setup.engines]
        if sum(taken) != given:
            words = " + ".join(map(str, taken))
            yield Violation(REPLICAS, setup.get(REPLICAS), f"engines of {given} ranks in all, not {words}", ANCHOR)
    elif given % engine:
        yield Violation(
            f"{VLLM}.tensor_parallel_size",
            setup.get(f"{VLLM}.tensor_parallel_size"),
            f"one engine of {engine} ranks (data x tensor x pipeline) has to divide the {given} that generate",
            ANCHOR,
        )


def _trainer_fills_its_ranks(setup: Setup) -> Found:
    ranks = setup.train_ranks
    if ranks <= 0:
        return
    if setup.trainer == "megatron":
        pipeline = setup.get(f"{MEGATRON}.pipeline_model_parallel_size")
        expert = setup.get(f"{MEGATRON}.expert_model_parallel_size") * setup.get(
            f"{MEGATRON}.expert_tensor_parallel_size"
        )
        sizes = (
            (setup.tensor_parallel_key, setup.tensor_parallel * pipeline, "tensor x pipeline"),
            (f"{MEGATRON}.expert_model_parallel_size", expert * pipeline, "expert x expert-tensor x pipeline"),
        )
    else:
        replicas = setup.get(f"{DTENSOR}.dp_replicate_size")
        sizes = (
            (setup.tensor_parallel_key, setup.tensor_parallel * replicas, "tensor x replicas"),
            (EXPERT, setup.get(EXPERT) * replicas, "expert x replicas"),
        )
    for key, product, words in sizes:
        if ranks % product:
            yield Violation(
                key, setup.get(key), f"{words} ({product}) has to divide the {ranks} ranks that train", ANCHOR
            )


def _trainer_divides_the_model(setup: Setup) -> Found:
    model, tensor = setup.model, setup.tensor_parallel
    if model is None:
        return
    if setup.trainer == "dtensor":
        yield from _dtensor_divides(setup, DTENSOR, model)
        return
    key = setup.tensor_parallel_key
    yield from _divides(key, tensor, model.heads, "attention heads")
    yield from _divides(key, tensor, model.intermediate, "columns of the feed-forward layers")
    yield from _shares_kv_heads(key, tensor, model.kv_heads)
    expert_key = f"{MEGATRON}.expert_model_parallel_size"
    width_key = f"{MEGATRON}.expert_tensor_parallel_size"
    yield from _divides(width_key, setup.get(width_key), model.expert_intermediate, "columns of an expert")
    yield from _pipeline_divides(setup, model.layers)
    yield from _experts(expert_key, setup.get(expert_key), model.experts)


def _dtensor_divides(setup: Setup, section: str, model: ModelFacts) -> Found:
    key, expert_key = f"{section}.tensor_parallel_size", f"{section}.expert_parallel_size"
    tensor = setup.get(key)
    yield from _divides(key, tensor, model.heads, "attention heads")
    yield from _divides(key, tensor, model.intermediate, "columns of the feed-forward layers")
    yield from _divides(key, tensor, model.kv_heads, "key-value heads")
    yield from _experts(expert_key, setup.get(expert_key), model.experts)


def _critic_fits(setup: Setup) -> Found:
    """Where it is cut as the policy is, one line says it all."""
    if setup.algorithm != "ppo" or setup.train_ranks <= 0:
        return
    sizes = ("tensor_parallel_size", "expert_parallel_size", "dp_replicate_size")
    tensor, expert, replicas = (setup.get(f"{VALUE}.{name}") for name in sizes)
    if setup.trainer == "dtensor" and (tensor, expert, replicas) == tuple(setup.get(f"{DTENSOR}.{n}") for n in sizes):
        return
    ranks, expert_key = setup.train_ranks, f"{VALUE}.expert_parallel_size"
    for key, product, words in (
        (f"{VALUE}.tensor_parallel_size", tensor * replicas, "tensor x replicas"),
        (expert_key, expert * replicas, "expert x replicas"),
    ):
        if ranks % product:
            limit = f"{words} of the value model ({product}) has to divide the {ranks} ranks that train"
            yield Violation(key, setup.get(key), limit, ANCHOR)
    if expert > 1 and expert % tensor:
        yield Violation(expert_key, expert, f"1, or a multiple of {VALUE}.tensor_parallel_size, {tensor}", ANCHOR)
    if setup.value_model is not None:
        yield from _dtensor_divides(setup, VALUE, setup.value_model)


def _pipeline_layout_fits(setup: Setup) -> Found:
    key = f"{MEGATRON}.pipeline_model_parallel_layout"
    text = setup.get(key)
    if setup.trainer != "megatron" or not text:
        return
    for name in (*STAGE_LAYERS, *STAGE_SHARES):
        if setup.get(f"{MEGATRON}.{name}") not in (None, False):
            yield Violation(f"{MEGATRON}.{name}", setup.get(f"{MEGATRON}.{name}"), f"unset, since {key} is set", ANCHOR)
    yield from (Violation(key, text, limit, ANCHOR) for limit in _limits_of_layout(setup, stages_of(text)))


def _limits_of_layout(setup: Setup, stages: list[str]) -> Iterator[str]:
    """What a pipeline layout has to be and is not."""
    held, count = "".join(stages), len(stages)
    if set(held) - LETTERS.keys():
        yield f"letters {', '.join(LETTERS)}, with | between stages and *n for repetition"
        return
    if (held[:1], held[-1:], held.count("E"), held.count("L")) != ("E", "L", 1, 1):
        yield "E first and L last, each once"
    ranks, chunks = (setup.get(f"{MEGATRON}.{name}pipeline_model_parallel_size") for name in ("", "virtual_"))
    if chunks or ranks == 1:
        wanted = ranks * (chunks or 1)
        if count != wanted:
            yield f"{wanted} {'stage' if wanted == 1 else 'stages'}, not {count}"
    elif count % ranks:
        yield f"a multiple of {ranks} stages, not {count}"
    layers = setup.model.layers if setup.model is not None else held.count("t")
    for letter, wanted in (("t", layers), ("m", setup.get(f"{MEGATRON}.mtp_num_layers"))):
        if held.count(letter) != wanted:
            yield f"{wanted} {LETTERS[letter]}s ({letter}), not {held.count(letter)}"


def _pipeline_divides(setup: Setup, layers: int) -> Found:
    key = f"{MEGATRON}.pipeline_model_parallel_size"
    stages = setup.get(key)
    if setup.get(f"{MEGATRON}.pipeline_model_parallel_layout"):
        return  # Megatron's own text says where every layer goes
    first, last = (setup.get(f"{MEGATRON}.{name}") for name in STAGE_LAYERS)
    left = layers - (first or 0) - (last or 0) + sum(setup.get(f"{MEGATRON}.{name}") for name in STAGE_SHARES)
    even = stages - (first is not None) - (last is not None)
    chunks = even * (setup.get(f"{MEGATRON}.virtual_pipeline_model_parallel_size") or 1)
    if chunks > 0 and left % chunks:
        yield Violation(key, stages, f"{chunks} equal stages or chunks have to divide {left} layers", ANCHOR)


def _engines_divide_the_model(setup: Setup) -> Found:
    replicas = setup.get(REPLICAS)
    if REPLICAS in setup.broken:
        return
    if replicas is None:
        yield from _engine_divides_the_model(setup, setup.engine_shape, lambda name: f"{VLLM}.{name}")
        return
    found: dict[Violation, None] = {}
    for index, (item, shape) in enumerate(zip(replicas, setup.engines, strict=True)):
        place = partial(_place_of, index, item)
        found |= dict.fromkeys(_engine_divides_the_model(setup, shape, place))
    yield from found


def _place_of(index: int, item: Mapping[str, Any], name: str) -> str:
    """Where a size of an engine is set: in its item of the list, or for all engines."""
    return f"{REPLICAS}[{index}].{name}" if name in item else f"{VLLM}.{name}"


def _engine_divides_the_model(setup: Setup, shape: EngineShape, place: Callable[[str], str]) -> Found:
    tensor_key, expert_key = place("tensor_parallel_size"), place("expert_parallel_size")
    tensor, expert, model = shape.tensor, shape.expert, setup.model
    if expert > 1 and expert % tensor:
        limit = f"1, or a multiple of the tensor-parallel size {tensor}: experts spread over data x tensor ranks"
        yield Violation(expert_key, expert, limit, ANCHOR)
    if model is None:
        return
    yield from _divides(tensor_key, tensor, model.heads, "attention heads")
    yield from _shares_kv_heads(tensor_key, tensor, model.kv_heads)
    yield from _divides(tensor_key, tensor, model.intermediate, "columns of the feed-forward layers")
    if expert == 1:
        yield from _divides(tensor_key, tensor, model.expert_intermediate, "columns of an expert")
    elif not model.experts or expert > model.experts:
        limit = f"at most the model's {model.experts} experts" if model.experts else "1, since the model has no experts"
        yield Violation(expert_key, expert, limit, ANCHOR)
    if model.layers and shape.pipeline > model.layers:
        limit = f"at most the model's {model.layers} layers"
        yield Violation(place("pipeline_parallel_size"), shape.pipeline, limit, ANCHOR)


def _divides(key: str, size: int, total: int, what: str) -> Found:
    if total and total % size:
        yield Violation(key, size, f"a divisor of the model's {total} {what}", ANCHOR)


def _shares_kv_heads(key: str, size: int, heads: int) -> Found:
    if heads and heads % size and size % heads:
        yield Violation(key, size, f"a divisor or a multiple of the model's {heads} key-value heads", ANCHOR)


def _experts(key: str, size: int, experts: int) -> Found:
    if size > 1 and not experts:
        yield Violation(key, size, "1, since the model has no experts", ANCHOR)
    else:
        yield from _divides(key, size, experts, "experts")


_RULES: tuple[Callable[[Setup], Found], ...] = (
    _cluster_is_large_enough,
    _generation_leaves_trainers,
    _engines_fill_their_ranks,
    _trainer_fills_its_ranks,
    _trainer_divides_the_model,
    _pipeline_layout_fits,
    _critic_fits,
    _engines_divide_the_model,
)
