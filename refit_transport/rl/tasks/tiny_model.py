"""Makes the tiny Qwen3 of the demo: random weights from a fixed seed, then a short supervised warm start.

The warm start teaches the form of an answer and a little of the task, so that some samples earn a reward and there is
something to reinforce.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as hf_logging

from refit_transport.rl.tasks import reverse_digits
from refit_transport.rl.tasks.tokenizer import character_tokenizer

STAMP = "tiny_model.json"
RECIPE = {"format": 1, "batch": 128, "lr": 2e-3, "warmup": 10, "num_digits": 3}
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE_SHAPE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True}


def make_tiny_model(path: str | Path, seed: int = 0, warm_start_steps: int = 25, moe: bool = False) -> Path:
    """Writes a Hugging Face checkpoint (0.8 M float32 parameters; 2.6 M with ``moe``) with its tokenizer to ``path``,
    and returns it. Does nothing when ``path`` already holds what these arguments give."""
    path = Path(path)
    stamp = _stamp(seed, warm_start_steps, moe)
    if (path / STAMP).is_file() and json.loads((path / STAMP).read_text()) == stamp:
        return path
    model = _warmed(seed, warm_start_steps, moe)
    building = path.with_name(f"{path.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    with _no_progress_bar():
        model.save_pretrained(building)
    character_tokenizer().save_pretrained(building)
    (building / STAMP).write_text(json.dumps(stamp))
    shutil.rmtree(path, ignore_errors=True)
    building.rename(path)
    return path


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A megabyte is written at once; a bar would only break up the run's own lines."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _stamp(seed: int, warm_start_steps: int, moe: bool) -> dict[str, object]:
    inputs = {"seed": seed, "warm_start_steps": warm_start_steps, "moe": moe}
    everything = json.dumps([inputs, RECIPE, SHAPE, MOE_SHAPE if moe else {}], sort_keys=True)
    return {**inputs, "digest": hashlib.sha256(everything.encode()).hexdigest()}


def _warmed(seed: int, steps: int, moe: bool) -> PreTrainedModel:
    """The model after ``steps`` of supervised training, without touching the caller's random state or threads."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # One thread: sums of many threads depend on their number, and the checkpoint should not.
        torch.set_num_threads(1)
        try:
            model = _random_model(moe)
            if steps:
                _warm_start(model, steps, seed)
        finally:
            torch.set_num_threads(threads)
    return model.eval()


def _random_model(moe: bool) -> PreTrainedModel:
    if moe:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MOE_SHAPE))
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


def _warm_start(model: PreTrainedModel, steps: int, seed: int) -> None:
    tokens, labels = _supervised(steps * RECIPE["batch"], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["lr"], weight_decay=0.0)
    for step in range(steps):
        rows = slice(step * RECIPE["batch"], (step + 1) * RECIPE["batch"])
        for group in optimizer.param_groups:
            group["lr"] = RECIPE["lr"] * min(1.0, (step + 1) / RECIPE["warmup"])
        logits = model(input_ids=tokens[rows], use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _supervised(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels (-100 on the prompt), both [count, S]."""
    tokenizer = character_tokenizer()
    drawn = reverse_digits.examples(count, seed, RECIPE["num_digits"])
    ids = [[*tokenizer(e.prompt + e.answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for e in drawn]
    tokens = torch.tensor(ids, dtype=torch.int64)
    labels = tokens.clone()
    labels[:, : RECIPE["num_digits"] + 1] = -100
    return tokens, labels
