"""Prompts and rewards: JSONL data sets, a resumable order of examples, reward functions named in the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

Prompt = str | Sequence[Mapping[str, str]]
"""Plain text, or chat messages (``role`` and ``content``) for the tokenizer's chat template."""

Rewards = float | Mapping[str, float]
"""A number, or named components (GDPO needs two or more)."""


@dataclass(frozen=True)
class Example:
    prompt: Prompt
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data set's line, for reward functions."""


Reward = Callable[[Example, str], Rewards]
"""``reward(example, completion)``."""


def exact_match(example: Example, completion: str) -> float:
    """1 for exactly the expected answer, 0 otherwise."""
    return float(completion == example.answer)


def load_jsonl(path: str | Path, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Example]:
    """One example per non-empty line. Raises ValueError with the line number for broken JSON or a missing key, and for
    a file that is missing or empty."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    numbered = enumerate(lines, start=1)
    examples = [_example(f"{path}:{number}", line, prompt_key, answer_key) for number, line in numbered if line.strip()]
    if not examples:
        raise ValueError(f"{path}: no examples")
    return examples


def _example(where: str, line: str, prompt_key: str, answer_key: str) -> Example:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if missing := [key for key in (prompt_key, answer_key) if key not in row]:
        raise ValueError(f"{where}: no key {missing}, the line has {sorted(row)}; set data.prompt_key, data.answer_key")
    prompt = row[prompt_key]
    return Example(prompt if isinstance(prompt, str | list) else str(prompt), str(row[answer_key]), row)


def load_reward(name: str) -> Reward:
    """``exact_match``, or the function ``module:function``, which is called with the prompt, the completion's text and
    the data set's row. Raises ValueError when the name has another form or leads nowhere."""
    if name == "exact_match":
        return exact_match
    module_name, separator, function_name = name.partition(":")
    if not separator or not module_name or not function_name:
        raise ValueError(f"env.reward: got {name!r}, allowed 'exact_match' or 'module:function'")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"env.reward: cannot import module {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"env.reward: module {module_name!r} has no function {function_name!r}")
    return lambda example, completion: function(example.prompt, completion, example.row)


class Dataloader:
    """Draws examples epoch after epoch, in an order that the seed fixes, and continues where a saved state stopped."""

    def __init__(self, examples: Sequence[Example], seed: int, shuffle: bool = True) -> None:
        self._examples = examples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    @property
    def size(self) -> int:
        return len(self._examples)

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._epoch

    def draw(self, count: int) -> list[Example]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Example:
        example = self._examples[self._order[self._position]]
        self._position += 1
        if self._position == len(self._examples):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return example

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._examples)))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(len(self._examples), generator=generator).tolist()

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position, "size": len(self._examples)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Raises ValueError when the data set has another size than the one the state was saved with."""
        if state["size"] != len(self._examples):
            raise ValueError(
                f"resume: the data set has {len(self._examples)} examples, the checkpoint was written with "
                f"{state['size']}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)


@dataclass(frozen=True)
class PromptEncoder:
    """Text to token ids and back, with a Hugging Face tokenizer."""

    tokenizer: Any
    max_tokens: int | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        """Chat messages go through the chat template, plain text does not. Raises ValueError for a prompt longer than
        ``max_tokens``."""
        text = prompt
        if not isinstance(prompt, str):
            text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise ValueError(
                f"data.max_input_seq_length: allowed {self.max_tokens}, got a prompt of {len(ids)} tokens: "
                f"{text[:80]!r}"
            )
        return ids

    def decode(self, token_ids: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """Text without the stop token at its end. Other special tokens stay visible, so that a reward sees them."""
        ids = list(token_ids)
        if ids and ids[-1] in {self.tokenizer.eos_token_id, *stop_token_ids}:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad
