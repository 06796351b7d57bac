"""Which checkpoints exist, which are kept, and when the last chance to save is."""

from __future__ import annotations

from pathlib import Path

import pytest

from refit_transport.rl.checkpoints import CheckpointStore, SaveDeadline, parse_duration
from refit_transport.rl.settings import CheckpointSettings

ACCURACY = {1: 0.3, 2: 0.9, 3: None, 4: 0.5, 5: 0.5, 6: 0.1}


def filled(folder: Path, **settings: object) -> CheckpointStore:
    store = CheckpointStore(folder, CheckpointSettings(**settings))
    for step, accuracy in ACCURACY.items():
        metrics = {"train/loss": -step} if accuracy is None else {"validation/accuracy": accuracy, "train/loss": -step}
        store.save(step, metrics, lambda path, step=step: (path / "weights").write_text(str(step)))
    return store


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_top_k": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep_top_k": 2}, [2, 5, 6]),
        ({"keep_top_k": 1, "higher_is_better": False}, [6]),
        ({"keep_top_k": 2, "metric_name": "train:loss"}, [1, 2, 6]),
        ({"keep_top_k": 2, "metric_name": None}, [5, 6]),
    ],
)
def test_the_best_and_the_newest_are_kept(tmp_path: Path, settings: dict, kept: list[int]) -> None:
    store = filled(tmp_path, **settings)
    assert [saved.step for saved in store.saved()] == kept
    assert (store.to_resume() / "weights").read_text() == "6"


def test_a_save_that_fails_leaves_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointSettings())

    def crash(path: Path) -> None:
        (path / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(1, {}, crash)
    assert store.to_resume() is None
    store.save(1, {}, lambda path: (path / "weights").write_text("whole"))
    assert (store.to_resume() / "weights").read_text() == "whole"


def test_resume_from_yields_to_the_runs_own_checkpoints(tmp_path: Path) -> None:
    filled(tmp_path / "old")
    for named in (tmp_path / "old", tmp_path / "old" / "step_2"):
        store = CheckpointStore(tmp_path / f"new-{named.name}", CheckpointSettings(resume_from=str(named)))
        assert store.to_resume().parent.name == "old"
        store.save(1, {}, lambda path: None)
        assert store.to_resume().parent.name.startswith("new")


def test_resume_from_must_hold_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no checkpoint and has none in it"):
        CheckpointStore(tmp_path, CheckpointSettings(resume_from=str(tmp_path / "nothing"))).to_resume()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("01:30", 90), ("02:00:00", 7200), ("01:00:00:05", 86405), ("00:00:03:45:00", None)],
)
def test_durations(text: str, seconds: int | None) -> None:
    if seconds is not None:
        assert parse_duration(text) == seconds
        return
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "soon", "1.5", "-3"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration(text)


def test_the_deadline_is_due_once_before_a_step_that_would_pass_it() -> None:
    times = iter([0.0, 10.0, 35.0, 45.0, 80.0, 90.0])
    deadline = SaveDeadline("01:00", clock=lambda: next(times))
    # The longest step took 25 s: at 35 s the next one may end at 60 s.
    assert [deadline.due() for _ in range(5)] == [False, True, False, False, False]


def test_without_a_deadline_nothing_is_due() -> None:
    assert not SaveDeadline(None).due()
