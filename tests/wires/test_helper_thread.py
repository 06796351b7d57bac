"""Calls that cannot be interrupted: left behind on news or at the deadline, and in nobody's way afterwards."""

from __future__ import annotations

import threading
import time

import pytest

from refit_transport.wires.helper_thread import HelperThread, Interrupted


def test_a_call_gives_its_result_or_its_error() -> None:
    helper = HelperThread("refit-test")
    assert helper.call(lambda: 3, time.monotonic() + 5, lambda: None) == 3
    with pytest.raises(ZeroDivisionError):
        helper.call(lambda: 1 // 0, time.monotonic() + 5, lambda: None)
    helper.close()


@pytest.mark.parametrize("news, seconds", [("rank 3 was lost", 20.0), (None, 0.2)])
def test_a_call_that_is_stuck_is_left_behind_and_the_next_one_is_served(news: str | None, seconds: float) -> None:
    helper, freed = HelperThread("refit-test"), threading.Event()
    with pytest.raises(Interrupted) as gave_up:
        helper.call(lambda: freed.wait(20), time.monotonic() + seconds, lambda: news)
    assert gave_up.value.news == news
    helper.close()
    assert helper.call(lambda: "served", time.monotonic() + 5, lambda: None) == "served"
    freed.set()
    helper.close()
    until = time.monotonic() + 5
    while any(thread.name == "refit-test" for thread in threading.enumerate()):
        assert time.monotonic() < until, "a thread stays"
        time.sleep(0.01)
