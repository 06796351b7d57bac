"""`verify: checksum`: a bit that changes on the way fails the refit on every rank, by name; and weights that stand
still are noticed."""

import pytest
import torch
from ranks import EngineRank, TrainerRank, World, run_ranks

from refit_transport.planning import compile_program
from refit_transport.runtime.binding import Binding
from refit_transport.runtime.checksums import ByteSum
from refit_transport.session.errors import RefitError
from refit_transport.session.member import EngineState

UP = "model.layers.0.mlp.up_proj.weight"
EMBED = "model.embed_tokens.weight"
DOMAINS = {"near": lambda world, rank: "here", "far": lambda world, rank: "ab"[rank >= world.trainers]}


def rank_of(world: World, rank: int, address: str, apart: str = "near"):
    make = TrainerRank if rank < world.trainers else EngineRank
    return make(world, rank, address, domain=DOMAINS[apart](world, rank))


def world_of(wire: str, scope: str = "ffn", verify: str = "checksum", trainers: int = 2, engines: int = 4) -> World:
    options = {"transport": "nccl_reshard", "scope": scope, "wire": wire, "verify": verify, "timeout_s": 20}
    return World(trainers, engines, options)


def find(binding: Binding, name: str, hop: int, sending: bool) -> tuple[int, int, int] | None:
    """Bucket, index of the message and row of the first piece of ``name`` that travels in ``hop``."""
    plan, program = binding.plan, binding.program
    for number, bucket in enumerate(program.buckets):
        for index, message in enumerate(bucket.sends if sending else bucket.recvs):
            for row in range(message.first, message.last):
                if message.hop == hop and plan.parameters[program.pieces.parameter[row]].name == name:
                    return number, index, row
    return None


def flip_on_the_way(binding: Binding, name: str, hop: int, sending: bool) -> None:
    """From the next bind on, one bit of a piece changes: after the sender summed it, or before the receiver does."""
    number, index, row = find(binding, name, hop, sending)
    bind = binding.bind

    def flip() -> None:
        bound = (binding.buckets[number].sends if sending else binding.buckets[number].recvs)[index]
        at = int(binding.program.pieces.offset[row])
        for segment in bound.segments:
            if at < segment.numel():
                segment[at] ^= 4
                return
            at -= segment.numel()

    def bind_and_break(staging) -> None:
        bind(staging)
        bucket = binding.buckets[number]
        copies = (bucket.sends[index].pack, bucket.pack) if sending else (bucket.recvs[index].unpack,)
        for each in copies:
            steps = (each.then or (lambda: None), flip)
            first, second = steps if sending else reversed(steps)
            each.then = lambda first=first, second=second: (first(), second())

    binding.bind = bind_and_break


def culprit(member, name: str, hop: int, sending: bool) -> bool:
    """Whether this is the lowest rank that has such a piece."""
    plan = member.agreement.plan
    for rank in plan.world:
        if find(Binding(plan, compile_program(plan, rank)), name, hop, sending):
            return rank == member.rank
    raise AssertionError(f"{name} does not travel in hop {hop}")


@pytest.mark.parametrize(
    "wire, apart, name, hop, sending",
    [
        ("tcp", "near", UP, 0, True),
        ("tcp", "near", EMBED, 0, True),
        ("tcp", "far", UP, 0, True),
        ("tcp", "far", EMBED, 0, False),
        ("tcp", "far", UP, 1, True),
        ("tcp", "far", EMBED, 1, True),
        ("gloo", "near", UP, 0, True),
        ("gloo", "far", EMBED, 0, True),
        ("gloo", "far", UP, 1, False),
        ("gloo", "far", EMBED, 1, False),
    ],
)
def test_one_changed_bit_fails_every_rank_by_name_and_engines_stay_stale(wire, apart, name, hop, sending):
    def body(world, rank, address):
        node = rank_of(world, rank, address, apart)
        node.member.refit(1)
        if breaks := culprit(node.member, name, hop, sending):
            node.member._binding.stale = True
            flip_on_the_way(node.member._binding, name, hop, sending)
        if rank < world.trainers:
            node.load(2)
        with pytest.raises(RefitError) as caught:
            node.member.refit(2)
        sink = node.member.sink
        return str(caught.value), node.member.state, breaks, sink is None or sink.version is None

    results = run_ranks(world_of(wire), body)
    assert not [r for r in results if isinstance(r, Exception)], results
    assert len({text for text, *_ in results}) == 1
    text = results[0][0]
    head, _, damaged = text.partition(": ")
    assert head == "weights changed on the way"
    assert all(each.startswith(f"{name} [") for each in damaged.split("; ")), "receivers of shared staging, nobody else"
    broken = next(rank for rank, (_, _, breaks, _) in enumerate(results) if breaks)
    role = "trainer" if broken < 2 else "engine"
    assert (f"from {role} rank {broken} to engine rank" if sending else f"to {role} rank {broken} (") in text
    assert all(state is EngineState.STALE and stale for _, state, _, stale in results)


@pytest.mark.parametrize("wire", ["tcp", "gloo"])
@pytest.mark.parametrize("apart, scope", [("near", "ffn"), ("far", "ffn"), ("far", "all")])
def test_sound_refits_pass_and_standing_weights_are_reported(wire, apart, scope):
    def body(world, rank, address):
        node = rank_of(world, rank, address, apart)
        seen = []
        for version, contents in ((1, 1), (2, 2), (3, 2), (4, 3)):
            if rank < world.trainers:
                node.load(contents)
            report = node.member.refit(version)
            seen.append(report.unchanged_since)
            assert "verify" in report.phases
            assert ("no weight changed since version 2" in report.line()) == (version == 3)
            assert rank < world.trainers or node.wrong(contents) == []
        node.member.leave()
        return seen

    assert run_ranks(world_of(wire, scope), body) == [[None, None, 2, None]] * 6


def test_one_trainers_step_is_enough_to_count_as_a_change():
    def body(world, rank, address):
        node = rank_of(world, rank, address)
        node.member.refit(1)
        if rank == 1:
            node.load(2)
        return node.member.refit(2).unchanged_since

    assert run_ranks(world_of("tcp"), body) == [None] * 6


@pytest.mark.parametrize("wire", ["tcp", "gloo"])
def test_nothing_is_summed_or_hooked_unless_asked(wire, monkeypatch):
    def refuse(*_):
        raise AssertionError("a sum was taken")

    monkeypatch.setattr(ByteSum, "__call__", refuse)

    def body(world, rank, address):
        node = rank_of(world, rank, address, "far")
        phases = node.member.refit(1).phases
        hooks = [
            copies.then
            for bucket in node.member._binding.buckets
            for copies in (bucket.pack, *(m.pack for m in bucket.sends), *(m.unpack for m in bucket.recvs))
        ]
        return "verify" in phases, [hook for hook in hooks if hook is not None]

    assert run_ranks(world_of(wire, verify="none"), body) == [(False, [])] * 6


def test_an_unknown_way_to_verify_is_refused_on_joining():
    results = run_ranks(world_of("tcp", verify="md5"), rank_of)
    assert all("verify is 'md5'; allowed: none, checksum" in str(r) for r in results)


def test_what_several_engines_receive_is_summed_once_by_its_sender(monkeypatch):
    counts = []
    real = ByteSum.__call__

    def counting(self, run: torch.Tensor):
        counts.append(run.numel())
        return real(self, run)

    monkeypatch.setattr(ByteSum, "__call__", counting)

    def body(world, rank, address):
        node = rank_of(world, rank, address)
        counts.clear()
        node.member.refit(1)
        return sum(counts), node.member._expected.sent["domain"]

    results = run_ranks(world_of("tcp", trainers=1, engines=2), body)
    summed, sent = results[0]
    whole = 4 * (7 * 10 + 9 * 10 + 10)
    assert sent - summed == whole, "broadcast tensors go to two engines, and are summed for one"
