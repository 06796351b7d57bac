"""vLLM's trainer-side interface on top of a refit session, for programs that use ``WeightTransferTrainerFactory``.

    plugin.register()
    engine = WeightTransferTrainerFactory.trainer_init(
        ReshardTrainerInitInfo(rank=rank, trainers=2, engine_ranks=(2,), address=address), client=client, source=source
    )
    engine.send_weights()

``source`` is a ``refit_transport.trainers.base.WeightSource`` (regions, not full tensors). Every rank calls both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

if TYPE_CHECKING:
    from refit_transport.session.member import RefitMember, RefitReport

log = logging.getLogger("refit_transport")


@dataclass(kw_only=True)
class ReshardTrainerInitInfo(TrainerInitInfo):
    """Trainers have joint ranks 0 to ``trainers`` - 1, the workers of the engines the ranks after them."""

    backend: ClassVar[str] = "nccl_reshard"

    address: str
    """``ControlServer.address`` of the session."""
    trainers: int
    engine_ranks: Sequence[int]
    """Workers per engine, in the order of the clients."""
    timeout: float | None = None


class ReshardTrainerEngine(TrainerWeightTransferEngine[ReshardTrainerInitInfo]):
    """``client`` is one client or, on rank 0, a list with one per engine. Rank 0 alone calls them, from side threads;
    vLLM's clients are not thread-safe, so the caller must not use them during ``trainer_init`` and ``send_weights``."""

    init_info_cls = ReshardTrainerInitInfo

    def __init__(self, *, info: ReshardTrainerInitInfo, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self._info = info
        clients = client if isinstance(client, list | tuple) else [client]
        self._clients = list(clients) if self.is_sender else []
        for kind in sorted({type(each).__name__ for each in self._clients if not _resets_prefix_cache(each)}):
            log.warning(
                "%s has no method reset_prefix_cache: after each refit the caller must reset the engine's prefix cache "
                "(POST /reset_prefix_cache), or start it with --no-enable-prefix-caching. Cached blocks of the old "
                "weights would answer prompts. The same holds for images and reset_encoder_cache.",
                kind,
            )
        self._pool = ThreadPoolExecutor(max(1, len(self._clients)), thread_name_prefix="refit-client")
        self._member: RefitMember | None = None
        self._lock = threading.Lock()

    @classmethod
    def trainer_init(cls, init_info: ReshardTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Join the session; on rank 0 also bring the engines into it. Blocks until all ranks joined.

        Raises ValueError when the clients and ``engine_ranks`` do not match, RefitError when a rank does not join.
        """
        from refit_transport.session.member import RefitMember

        self = cls(info=init_info, client=client, source=source)
        if self.is_sender and len(self._clients) != len(init_info.engine_ranks):
            raise ValueError(f"{len(self._clients)} clients for {len(init_info.engine_ranks)} engines")
        offsets = [init_info.trainers + sum(init_info.engine_ranks[:i]) for i in range(len(init_info.engine_ranks))]
        joined = [
            self._pool.submit(
                each.init_weight_transfer_engine,
                {"address": init_info.address, "engine": i, "rank_offset": offsets[i], "timeout": init_info.timeout},
            )
            for i, each in enumerate(self._clients)
        ]
        with _awaited(joined):
            self._member = RefitMember.join(
                init_info.address, rank=init_info.rank, role="trainer", source=source, timeout=init_info.timeout
            )
        if self.is_sender:
            log.info(self._member.plan_summary().line())
        return self

    def send_weights(self) -> RefitReport:
        """Bring every engine to the next version, reset its caches of prefixes and of encoded images where the client
        can, and label the weights with the version. Raises RefitError on every rank when a rank failed."""
        with self._lock:
            version = self._member.version + 1
            updates = [self._pool.submit(self._update, each, version) for each in self._clients]
            with _awaited(updates):
                return self._member.refit(version, timeout=self._info.timeout)

    def shutdown(self) -> None:
        """Leave the session. May be called twice."""
        if self._member is not None:
            self._member.leave()
        self._pool.shutdown(wait=False)

    @staticmethod
    def _update(client: Any, version: int) -> None:
        client.start_weight_update()
        client.update_weights({"version": version})
        client.finish_weight_update(str(version))
        if _resets_prefix_cache(client):
            client.reset_prefix_cache()
        if callable(reset := getattr(client, "reset_encoder_cache", None)):
            reset()


def _resets_prefix_cache(client: Any) -> bool:
    """vLLM's four-method protocol has no such call, and its HTTP client lacks it."""
    return callable(getattr(client, "reset_prefix_cache", None))


@contextmanager
def _awaited(calls: Sequence[Future[None]]) -> Iterator[None]:
    """Run the block beside ``calls`` and leave only when they are done, whatever failed. An engine that failed knows
    more than the trainer that waited for it, so its error is the cause of the block's."""
    try:
        yield
    except Exception as error:
        wait(calls)
        cause = next((call.exception() for call in calls if call.exception() is not None), None)
        raise error from cause
    for call in calls:
        call.result()
