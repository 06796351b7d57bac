"""Asynchronous GRPO: what is generated when, with which weights, and how failures surface."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refit_transport.rl.assemble import violations
from refit_transport.rl.loop import TrainingLoop
from tests.rl.stand_ins import ScriptedEngines, scripted_loop

DEADLINE = 20.0


def ahead_loop(folder: Path, age: int = 1, **options: Any) -> tuple[TrainingLoop, SimpleNamespace]:
    return scripted_loop(
        folder,
        loss={"use_importance_sampling_correction": True},
        async_grpo={"enabled": True, "max_trajectory_age_steps": age},
        **options,
    )


class WatchedEngines:
    """Wraps scripted engines' methods: waits between generations as told, and sees refits that overlap one."""

    def __init__(self, engines: ScriptedEngines) -> None:
        self.generated = threading.Semaphore(0)
        self.generating = False
        self.overlaps = 0
        self._generate, self._refit = engines.generate, engines.refit
        engines.generate, engines.refit = self.generate, self.refit

    def generate(self, *arguments: Any) -> Any:
        self.generating = True
        completions = self._generate(*arguments)
        self.generating = False
        self.generated.release()
        return completions

    def refit(self, version: int) -> Any:
        self.overlaps += self.generating
        return self._refit(version)


@pytest.mark.parametrize("age", [1, 3])
def test_each_step_consumes_what_was_generated_for_it_within_the_age(tmp_path: Path, age: int) -> None:
    sync, sync_made = scripted_loop(tmp_path / "sync", max_num_steps=8)
    sync.run()
    loop, made = ahead_loop(tmp_path / "ahead", age, max_num_steps=8)
    watched = WatchedEngines(made.engines)
    result = loop.run()
    assert (result.steps, result.weight_version) == (8, 9)
    prompts = [[row["prompt"] for row in rows] for rows in made.trace.rows]
    assert prompts == [[row["prompt"] for row in rows] for rows in sync_made.trace.rows]
    assert [s.seed for s in made.trace.samplings] == [s.seed for s in sync_made.trace.samplings]
    ages = [metrics["train/avg_trajectory_age"] for _, metrics in made.trace.steps]
    assert ages[0] == 0
    assert max(ages) <= age
    assert watched.overlaps == 0


def test_the_engines_generate_while_the_trainer_trains(tmp_path: Path) -> None:
    loop, made = ahead_loop(tmp_path, max_num_steps=4)
    watched = WatchedEngines(made.engines)
    train, acquired, trained = made.policy.train, 0, 0

    def waits_for_the_next_rollouts(batch: Any, loss: Any) -> dict[str, float]:
        """Returns only when the rollouts of the step after this one are there, up to the last step."""
        nonlocal acquired, trained
        trained += 1
        while acquired < min(trained + 1, 4):
            assert watched.generated.acquire(timeout=DEADLINE), "nothing was generated while the trainer trained"
            acquired += 1
        return train(batch, loss)

    made.policy.train = waits_for_the_next_rollouts
    loop.run()
    ages = [metrics["train/avg_trajectory_age"] for _, metrics in made.trace.steps]
    assert ages == [0, 1, 1, 1]


def test_nothing_is_generated_beyond_the_last_step(tmp_path: Path) -> None:
    loop, made = ahead_loop(tmp_path, age=5, max_num_steps=3)
    loop.run()
    assert len(made.trace.samplings) == 3
    assert not loop.collector._worker.is_alive()


def test_validation_has_the_engines_to_itself_and_current_weights(tmp_path: Path) -> None:
    loop, made = ahead_loop(tmp_path, max_num_steps=4, val_period=2, max_val_samples=4, val_at_start=True)
    watched = WatchedEngines(made.engines)
    loop.run()
    assert [step for step, metrics in made.trace.steps if "validation/accuracy" in metrics] == [0, 2, 4]
    assert watched.overlaps == 0


def test_a_failure_in_the_background_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    loop, made = ahead_loop(tmp_path, max_num_steps=6)
    generate = made.engines.generate

    def dies_at_the_third(*arguments: Any) -> Any:
        if len(made.trace.samplings) == 2:
            raise ConnectionError("engine 1 is gone")
        return generate(*arguments)

    made.engines.generate = dies_at_the_third
    with pytest.raises(RuntimeError, match="generating ahead") as error:
        loop.run()
    assert "engine 1 is gone" in str(error.value.__cause__)


def test_a_resumed_run_generates_again_what_had_not_been_consumed(tmp_path: Path) -> None:
    saving = {"enabled": True}
    whole, whole_made = ahead_loop(tmp_path / "whole", max_num_steps=5)
    whole.run()
    ahead_loop(tmp_path / "parts", age=2, max_num_steps=2, checkpointing=saving)[0].run()
    second, made = ahead_loop(tmp_path / "parts", age=2, max_num_steps=5, checkpointing=saving)
    second.run()
    prompts, expected = ([[row["prompt"] for row in rows] for rows in one.trace.rows] for one in (made, whole_made))
    assert prompts == expected[2:]
    assert made.trace.steps[0][1]["train/avg_trajectory_age"] == 0


@pytest.mark.parametrize(
    ("section", "loss", "words"),
    [
        ({"async_grpo": {"enabled": True}}, {}, "needs loss_fn.use_importance_sampling_correction: true"),
        ({"async_grpo": {"enabled": True, "max_trajectory_age_steps": 0}}, {}, "got 0, allowed 1 or more"),
        ({"async_grpo": {"enabled": True, "in_flight_weight_updates": True}}, {}, "in_flight_weight_updates"),
        ({"async_grpo": {"enabled": True}, "use_dynamic_sampling": True}, {}, "excludes use_dynamic_sampling"),
    ],
)
def test_what_asynchronous_runs_cannot_do_is_refused(section: dict, loss: dict, words: str) -> None:
    assert any(words in line for line in violations({"grpo": section, "loss_fn": loss}, "grpo"))
