"""A refit session between a checkpoint in this process and a vLLM engine, through vLLM's own trainer interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refit_transport.layout.region import Region
from refit_transport.session.control_server import ControlServer
from refit_transport.trainers.tensors import TensorSource
from tests.models import read_checkpoint


@dataclass
class Client:
    """vLLM's client protocol over an engine inside this process."""

    llm: Any
    resets: int = 0
    encoder_resets: int = 0

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        self.llm.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        self.encoder_resets += 1
        self.llm.llm_engine.reset_encoder_cache()


def status_of(llm: Any) -> list[dict[str, Any]]:
    """Per worker."""
    return llm.collective_rpc("refit_status")


def source_of(path: Path, leave_out: Sequence[str] = ()) -> TensorSource:
    """The whole checkpoint at ``path``, held by one rank."""
    tensors = {name: tensor for name, tensor in read_checkpoint(path).items() if name not in leave_out}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return TensorSource(shapes, {name: [(Region.whole(shapes[name]), t)] for name, t in tensors.items()})


def joined(llm: Any, path: Path, workers: int = 1, leave_out: Sequence[str] = ()) -> tuple[ControlServer, Client, Any]:
    """A session of one trainer, in this process, that holds the checkpoint at ``path``, and the workers of ``llm``."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from refit_transport.engines.vllm.plugin import register
    from refit_transport.engines.vllm.trainer_engine import ReshardTrainerInitInfo

    register()
    server = ControlServer(1 + workers, {"transport": "nccl_reshard", "scope": "all", "timeout_s": 60.0})
    client = Client(llm)
    info = ReshardTrainerInitInfo(rank=0, address=server.address, trainers=1, engine_ranks=(workers,))
    try:
        source = source_of(path, leave_out)
        return server, client, WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    except BaseException:
        server.close()
        raise
