"""The plan and its digest are the same in every process, and the digest changes with everything a plan depends on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from refit_transport.layout import Replicate, Shard
from refit_transport.planning import Plan, PlanOptions
from tests.planning.sides import Side, on_mesh, planned

PROGRAM = """
from tests.planning.test_digest import reference
from refit_transport.planning import compile_program
import hashlib
plan = reference()
text = repr([plan.digest, plan.buckets, [list(g.transfers) for g in plan.groups]])
text += repr([compile_program(plan, r).buckets for r in plan.world])
print(hashlib.sha256(text.encode()).hexdigest())
"""


def sides() -> tuple[Side, Side]:
    source = {f"layers.{i}.w": on_mesh((16, 6), range(4), [Replicate(), Shard(0)], (2, 2)) for i in range(3)}
    sink = {name: on_mesh((16, 6), range(4, 10), [Replicate(), Shard(1)], (2, 3)) for name in source}
    return source, sink


def reference(options: PlanOptions = PlanOptions(stripe_bytes=1), domains: object = None) -> Plan:  # noqa: B008
    return planned(*sides(), domains or [range(4), range(4, 7), range(7, 10)], options)


def test_plans_are_equal_in_every_process_and_under_every_hash_seed() -> None:
    found = set()
    for seed in ("0", "1", "2023"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert len(found) == 1


OTHER_VALUES = [
    ("bucket_bytes", 1 << 20),
    ("stripe_bytes", 2),
    ("once_per_domain", False),
    ("relay", "never"),
    ("network_ports", "domain"),
    ("broadcast_root", "single"),
    ("wire_dtype", "float32"),
]


@pytest.mark.parametrize(("option", "value"), OTHER_VALUES)
def test_the_digest_covers_every_option(option: str, value: object) -> None:
    assert reference(PlanOptions(**{"stripe_bytes": 1, option: value})).digest != reference().digest


def test_no_option_is_missing_from_the_values_tried_above() -> None:
    assert {option for option, _ in OTHER_VALUES} == {field.name for field in fields(PlanOptions)}


def test_the_digest_covers_domains_layouts_dtypes_and_the_planner_version(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = sides()
    digests = [reference().digest, reference(domains=[range(10)]).digest]
    other = {**sink, "layers.0.w": on_mesh((16, 6), range(4, 10), [Replicate()])}
    domains = [range(4), range(4, 7), range(7, 10)]
    digests.append(planned(source, other, domains).digest)
    digests.append(planned(source, sink, domains, dtypes=("float32", "bfloat16")).digest)
    copies = {name: on_mesh((16, 6), range(4, 10), [Replicate()]) for name in sink}
    digests += [planned(source, copies, domains, whole=whole).digest for whole in (False, True)]
    monkeypatch.setattr("refit_transport.planning.digest.PLANNER_VERSION", -1)
    digests.append(reference().digest)
    assert len(set(digests)) == len(digests)


def test_the_order_in_which_trainers_list_parameters_does_not_matter() -> None:
    source, sink = sides()
    shuffled = dict(reversed(source.items()))
    plan = planned(shuffled, sink, [range(4), range(4, 7), range(7, 10)])
    assert [p.name for p in plan.parameters] == [f"layers.{i}.w" for i in range(3)]
