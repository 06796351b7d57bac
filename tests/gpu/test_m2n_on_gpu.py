"""The NCCL M2N wire over the real `nccl.m2n`: several ranks, on one GPU if there is one."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from device_ranks import enter, needs, refits
from forked_wires import Ranks
from refit_cases import Case, Tensor, columns, everything, merged, rows
from small_cases import CASES, TWO_DOMAINS, WIDE, E, T

from refit_transport.wires.m2n import M2nWire

pytestmark = pytest.mark.gpu

HOST_RMA_NCCL = (2, 30, 7)
"""M2N moves bytes by copy engines from here on; older ones need a GPU-initiated network."""

CUBE, LARGE = (8, 48, 64), (4096, 4096)
MIXED = Case(
    (
        *(Tensor(f"rows{i}", WIDE, rows(WIDE, T), columns(WIDE, E), "bfloat16") for i in range(5)),
        *(Tensor(f"experts{i}", CUBE, rows(CUBE, T), columns(CUBE, E), "float8_e4m3fn") for i in range(3)),
        Tensor("to every rank", WIDE, rows(WIDE, T), everything(WIDE, E)),
        Tensor("from replicas", WIDE, everything(WIDE, T), columns(WIDE, E)),
        Tensor("cast", WIDE, rows(WIDE, T), columns(WIDE, E), "float32", "bfloat16"),
        Tensor("uneven", (7, 10), rows((7, 10), T), columns((7, 10), E)),
        Tensor("norm", (7,), everything((7,), T), everything((7,), E), whole=True),
    ),
    TWO_DOMAINS,
    {"bucket_bytes": 1 << 20},
)
REPLICAS = Case(
    tuple(
        Tensor(f"w{i}", LARGE, rows(LARGE, T), merged(columns(LARGE, [2, 3]), columns(LARGE, [4, 5])), "bfloat16")
        for i in range(4)
    ),
    ((0, 1), (2, 3, 4, 5)),
    {"bucket_bytes": 64 << 20},
)


@pytest.mark.parametrize(
    "case", [CASES["one hop"], MIXED, Case(MIXED.tensors, TWO_DOMAINS, MIXED.options, strided=True), REPLICAS]
)
def test_every_destination_holds_exactly_the_new_version(case: Case) -> None:
    if not (find_spec("nccl") and find_spec("nccl.m2n")):
        pytest.skip("needs pip install 'refit-transport[m2n]'")
    needs(HOST_RMA_NCCL)
    with Ranks(refits(case, M2nWire, 3), case.domains, len(T), enter=enter) as ranks:
        ranks.exchange_endpoints()
        for _ in range(3):
            for rank in ranks.pipes:
                ranks.expect(rank, "here", 180)
            for pipe in ranks.pipes.values():
                pipe.send(None)
        results = ranks.results(seconds=120)
    assert {rank: found for rank, (found, _) in results.items() if found} == {}
    nbytes = sum(2 * t.shape[0] * t.shape[1] for t in case.tensors if t.shape == LARGE)
    if nbytes:
        seconds = min(max(seen[version][0] for _, seen in results.values()) for version in (1, 2))
        print(f"\n{nbytes / 1e6:.0f} MB to two replicas in {seconds:.4f} s: {nbytes / seconds / 1e9:.1f} GB/s")
