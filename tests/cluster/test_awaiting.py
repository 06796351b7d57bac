"""What ends a wait for several Ray actors, and whom the error names."""

import os
import time

import pytest
import ray

from refit_transport.cluster.awaiting import await_all
from refit_transport.cluster.errors import ClusterError

pytestmark = pytest.mark.engine


def peer_class() -> type:
    """Made in a function, since Ray's workers cannot import this file."""

    class Peer:
        """An actor that ends a call in the way it is asked to, after ``seconds``."""

        def end(self, how: str, seconds: float) -> str:
            time.sleep(seconds)
            if how == "die":
                os._exit(1)
            if how == "raise":
                raise ConnectionError("connection closed by peer")
            return how

    return Peer


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="critical")
    yield
    ray.shutdown()


@pytest.fixture
def calls(cluster):
    """``calls((how, seconds), ...)``: one call of each of so many actors, whose processes run already."""
    peers = []

    def make(*ends):
        peers.extend(ray.remote(peer_class()).options(num_cpus=0).remote() for _ in ends)
        ray.get([peer.end.remote("answer", 0) for peer in peers], timeout=60)
        return [(f"rank {n}", peer.end.remote(*end)) for n, (peer, end) in enumerate(zip(peers, ends, strict=True))]

    yield make
    for peer in peers:
        ray.kill(peer)


def test_answers_come_in_the_order_of_the_calls(calls):
    assert await_all(calls(("late", 0.5), ("early", 0)), "asking", 30) == ["late", "early"]


def test_a_peers_lost_connection_is_not_blamed_where_a_process_died(calls):
    waited = calls(("raise", 0), ("die", 0.5), ("raise", 0))
    with pytest.raises(ClusterError, match=r"^rank 1 died while adding"):
        await_all(waited, "adding", 30)


def test_a_failure_is_named_although_another_never_answers(calls):
    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"^rank 1 failed while adding: ConnectionError: connection closed by peer"):
        await_all(calls(("answer", 60), ("raise", 0)), "adding", 60)
    assert time.monotonic() - started < 30


def test_who_does_not_answer_in_time_is_named(calls):
    with pytest.raises(ClusterError, match=r"^adding: no answer within 1 s from rank 0$"):
        await_all(calls(("answer", 60), ("answer", 0)), "adding", 1)
