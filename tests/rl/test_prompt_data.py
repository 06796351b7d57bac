"""Data sets, rewards named in the configuration, and the order of examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from refit_transport.rl.batch import pad_sequences
from refit_transport.rl.data import Dataloader, Example, PromptEncoder, load_jsonl, load_reward
from refit_transport.rl.settings import DataSettings, EnvSettings
from refit_transport.rl.tasks.registry import load_task
from refit_transport.rl.tasks.tokenizer import CHARACTERS, character_tokenizer


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_jsonl_takes_its_keys_from_the_configuration(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write_lines(tmp_path / "d.jsonl", {"q": "1+1=", "a": 2, "level": 3}, "", {"q": chat, "a": "hello"})
    first, second = load_jsonl(path, "q", "a")
    assert (first.prompt, first.answer, first.row["level"]) == ("1+1=", "2", 3)
    assert second.prompt == chat


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a", "answer": "b"}, "{"], r"d\.jsonl:2: not JSON"),
        ([{"prompt": "a"}], r"d\.jsonl:1: no key \['answer'\], the line has \['prompt'\]"),
        ([""], "no examples"),
    ],
)
def test_broken_jsonl_is_named_by_file_and_line(tmp_path: Path, rows: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_jsonl(write_lines(tmp_path / "d.jsonl", *rows))


def longest_wins(prompt: str, completion: str, row: dict) -> dict[str, float]:
    return {"length": float(len(completion)), "level": float(row["level"])}


def test_a_reward_function_gets_prompt_completion_and_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "a", "level": 7})
    data = DataSettings(dataset_name="jsonl", train_path=str(path), val_path=str(path))
    task = load_task(data, EnvSettings(f"{__name__}:longest_wins"))
    assert task.reward(task.train[0], "four") == {"length": 4.0, "level": 7.0}
    assert task.validation == task.train


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact", "allowed 'exact_match' or 'module:function'"),
        ("json:", "allowed 'exact_match' or 'module:function'"),
        ("no_such_module:f", "cannot import module 'no_such_module'"),
        ("json:no_such_function", "has no function 'no_such_function'"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_reward(name)


def test_exact_match_needs_the_whole_answer() -> None:
    reward, example = load_reward("exact_match"), Example("12=", "21")
    assert [reward(example, text) for text in ("21", "21 ", "2", "21<pad>")] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataSettings(dataset_name="gsm8k"), "allowed"),
        (DataSettings(dataset_name="jsonl"), "needs the path of a file"),
        (DataSettings(dataset_name="jsonl", train_path="missing.jsonl"), "no such file"),
    ],
)
def test_unknown_data_sets_are_refused(data: DataSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_task(data, EnvSettings())


EXAMPLES = [Example(str(n), "") for n in range(10)]


def test_every_epoch_shows_each_example_once_in_a_new_order() -> None:
    loader = Dataloader(EXAMPLES, seed=1)
    epochs = [[example.prompt for example in loader.draw(10)] for _ in range(3)]
    assert all(sorted(epoch) == [str(n) for n in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3


def test_without_shuffling_the_order_is_the_files() -> None:
    assert [example.prompt for example in Dataloader(EXAMPLES, 1, shuffle=False).draw(12)][8:] == ["8", "9", "0", "1"]


@pytest.mark.parametrize("drawn", [0, 7, 10, 13, 25])
def test_a_restored_loader_goes_on_where_the_other_stopped(drawn: int) -> None:
    loader, restored = Dataloader(EXAMPLES, seed=3), Dataloader(EXAMPLES, seed=3)
    loader.draw(drawn)
    restored.restore(json.loads(json.dumps(loader.state())))
    assert restored.draw(15) == loader.draw(15)


def test_the_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded(CHARACTERS, add_special_tokens=False).input_ids
    assert ids == list(range(4, 4 + len(CHARACTERS)))
    assert loaded.decode(ids) == CHARACTERS


def test_only_a_stop_token_at_the_end_is_hidden_from_the_reward() -> None:
    encoder = PromptEncoder(character_tokenizer())
    four, pad, eos = encoder.encode("4")[0], 0, 2
    assert encoder.decode([four, four, eos]) == "44"
    assert encoder.decode([four, pad, eos]) == "4<pad>"
    assert encoder.decode([four, eos, four]) == "4<eos>4"
    assert encoder.decode([four, pad], stop_token_ids=(pad,)) == "4"


def test_chat_messages_go_through_the_chat_template() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    encoder = PromptEncoder(tokenizer)
    assert tokenizer.decode(encoder.encode([{"role": "user", "content": "12"}])) == "<12>="


def test_long_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed 3, got a prompt of 4 tokens: '123='"):
        PromptEncoder(character_tokenizer(), max_tokens=3).encode("123=")


def test_padding_aligns_everything_with_the_tokens() -> None:
    batch = pad_sequences([[5, 6], [7]], [[8], [9, 10, 11]], [[-0.1], [-0.2, -0.3, -0.4]], 0, 4)
    assert batch["input_ids"].tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert batch["input_lengths"].tolist() == [3, 4]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch["generation_logprobs"][1].tolist() == pytest.approx([0, -0.2, -0.3, -0.4])


@pytest.mark.parametrize(
    ("prompt", "logprobs", "words"), [([1], [-0.1, -0.2], "1 generated tokens but 2"), ([], [-0.1], "no token")]
)
def test_malformed_samples_are_refused(prompt: list, logprobs: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pad_sequences([prompt], [[8]], [logprobs], 0)
