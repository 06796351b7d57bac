"""Turns ``data.*`` and ``env.*`` into examples to train on, examples to validate on, and a reward."""

from __future__ import annotations

from dataclasses import dataclass

from refit_transport.rl.data import Example, Reward, load_jsonl, load_reward
from refit_transport.rl.settings import DataSettings, EnvSettings
from refit_transport.rl.tasks import reverse_digits

DATASETS = ("reverse_digits", "jsonl")
TRAIN_SIZE, TRAIN_SEED = 8192, 0
VALIDATION_SIZE, VALIDATION_SEED = 256, 12345


@dataclass(frozen=True)
class Task:
    train: list[Example]
    validation: list[Example]
    reward: Reward


def load_task(data: DataSettings, env: EnvSettings) -> Task:
    """Raises ValueError for an unknown data set or reward, and for files that are missing or unreadable."""
    reward = load_reward(env.reward)
    if data.dataset_name == "reverse_digits":
        train = reverse_digits.examples(TRAIN_SIZE, TRAIN_SEED, data.num_digits)
        return Task(train, reverse_digits.examples(VALIDATION_SIZE, VALIDATION_SEED, data.num_digits), reward)
    if data.dataset_name != "jsonl":
        raise ValueError(f"data.dataset_name: got {data.dataset_name!r}, allowed {DATASETS}")
    if not data.train_path:
        raise ValueError(f"data.train_path: got {data.train_path!r}, dataset_name 'jsonl' needs the path of a file")
    train = load_jsonl(data.train_path, data.prompt_key, data.answer_key)
    validation = load_jsonl(data.val_path, data.prompt_key, data.answer_key) if data.val_path else []
    return Task(train, validation, reward)
