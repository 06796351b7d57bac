"""A session between two emulated hosts: members find each other by the address they reach the coordinator at."""

import os
import pickle

import pytest
import torch
from ranks import EngineRank, TrainerRank, World

from refit_transport.bench.netlab import Lab, enter_namespace, supported
from refit_transport.session.control_server import ControlServer

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(supported()), reason=str(supported()))]

WORLD = World(1, 1)


def run_on(host, lab, reader, writer):
    """The coordinator and the trainer live on host 0; the engine on host 1 learns the address through a pipe."""
    enter_namespace(lab.namespace(host))
    if host == 0:
        server = ControlServer(WORLD.size, WORLD.options, host=lab.address(0))
        os.write(writer, server.address.encode())
        node = TrainerRank(WORLD, 0, server.address, domain="host 0")
    else:
        node = EngineRank(WORLD, 1, os.read(reader, 200).decode(), domain="host 1")
    seen = []
    for version in (1, 2):
        if host == 0:
            node.load(version)
        report = node.member.refit(version, timeout=20)
        seen.append((report.bytes_network, [] if host == 0 else node.wrong(version)))
    node.member.leave()
    return seen


def test_a_refit_crosses_hosts_without_any_address_in_the_configuration():
    reader, writer = os.pipe()
    with Lab(2, None) as lab:
        children = []
        for host in range(2):
            results, answer = os.pipe()
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                try:
                    outcome = run_on(host, lab, reader, writer)
                except BaseException as error:
                    outcome = repr(error)
                os.write(answer, pickle.dumps(outcome))
                os._exit(0)
            os.close(answer)
            children.append((pid, results))
        outcomes = []
        for pid, results in children:
            with os.fdopen(results, "rb") as pipe:
                outcomes.append(pickle.loads(pipe.read()))
            os.waitpid(pid, 0)
    trainer, engine = outcomes
    assert [wrong for _, wrong in engine] == [[], []]
    assert all(moved > 0 for moved, _ in trainer)
