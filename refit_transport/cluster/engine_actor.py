"""The Ray actor of one engine core: a vLLM ``LLM`` whose workers are inference ranks of the refit session."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import ray

from refit_transport.rl.protocols import Completion, SamplingConfig

from .data_parallel import free_port
from .errors import ClusterError
from .orphans import DIE_WITH_PARENT


class EngineActor:
    """One vLLM instance: the engine ``replica``, or one of its data-parallel cores. A single thread calls it: ``LLM``
    is not thread-safe."""

    def __init__(self, replica: int, name: str) -> None:
        self.replica, self.name = replica, name
        self._llm: Any = None
        self._joined = False
        self._progress_bar = False

    def data_parallel_address(self) -> tuple[str, int]:
        """Where the cores of this one's engine can meet."""
        return ray.util.get_node_ip_address(), free_port(self.replica)

    def start(self, engine_args: dict[str, Any], parallel: bool, env: Mapping[str, str], progress_bar: bool) -> None:
        """Build the engine; returns when all cores of it are built. ``parallel`` False keeps a single-rank core inside
        this process. vLLM's ``progress_bar`` goes to the actor's log."""
        self._progress_bar = progress_bar
        os.environ.update(env)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if parallel else "0"
        os.environ[DIE_WITH_PARENT] = "1"
        from vllm import LLM

        self._llm = LLM(**engine_args)

    def host(self) -> str:
        return socket.gethostname()

    def pid(self) -> int:
        return os.getpid()

    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [status["pid"] for status in self._llm.collective_rpc("refit_status")]

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig) -> list[Completion]:
        """One completion per prompt, under the version that all workers hold. All cores of an engine have to be called,
        each with a prompt or more: experts on one compute for all. Raises ClusterError, and leaves the engine alive,
        when a worker holds torn weights, or none of its session."""
        self._check_fresh()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [_sampling_params(sampling, index) for index in range(len(prompts))],
            use_tqdm=self._progress_bar,
        )
        version = self.weight_version()
        return [_completion(output.outputs[0], version) for output in outputs]

    def join_refit(self, address: str, rank_offset: int, timeout: float, domain: str | None) -> None:
        """``rank_offset`` is the joint rank of the engine's first worker, on whichever core that is."""
        self.leave_refit()
        info = {
            "address": address,
            "engine": self.replica,
            "rank_offset": rank_offset,
            "timeout": timeout,
            "domain": domain,
        }
        self._llm.init_weight_transfer_engine({"init_info": info})
        self._joined = True

    def refit(self, version: int, timeout: float) -> None:
        """Receive ``version``; returns after the commit. The prefix cache holds keys of the old weights: it is
        reset."""
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"version": version, "timeout": timeout}})
        self._llm.finish_weight_update(str(version))
        self._llm.reset_prefix_cache()

    def weight_version(self) -> int:
        """The version that every worker of this engine has committed; -1 when they hold none, or different ones."""
        versions = {s["version"] if s["state"] == "fresh" else -1 for s in self._llm.collective_rpc("refit_status")}
        return versions.pop() if len(versions) == 1 else -1

    def fingerprint(self) -> list[dict[str, str]]:
        """Content of everything that the kernels read, per worker."""
        return self._llm.collective_rpc("weight_fingerprint")

    def _check_fresh(self) -> None:
        """A stale worker raises when it is asked to compute, and vLLM ends an engine whose step raises."""
        refusals = [s["refusal"] for s in self._llm.collective_rpc("refit_status") if s["refusal"]]
        if refusals:
            raise ClusterError(f"{self.name} cannot generate: {refusals[0]}")

    def leave_refit(self) -> None:
        if self._joined:
            self._llm.shutdown_weight_transfer_engine()
            self._joined = False

    def shutdown(self) -> None:
        if self._llm is not None:
            self.leave_refit()
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None


def _sampling_params(sampling: SamplingConfig, index: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        seed=None if sampling.seed is None else sampling.seed + index,
        logprobs=0,
        detokenize=bool(sampling.stop_strings),
    )


def _completion(output: Any, version: int) -> Completion:
    """``logprobs=0`` makes the engine report the sampled token alone, after temperature."""
    return Completion(
        token_ids=list(output.token_ids),
        logprobs=[step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)],
        finish_reason=output.finish_reason,
        weight_versions=(version,),
    )
