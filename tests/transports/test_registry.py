"""Names lead to transports, and a name that leads nowhere says what would, and what failed to load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from refit_transport.transports import registry

PLUGIN = """
class Mine:
    name = "mine"
    def plan_options(self, cfg): ...
    def direct_names(self, parameters, cfg): ...
    def wire_name(self, cfg): ...

class Empty: ...
number = 3
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An importable module with one transport and two things that are none."""
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_plugin"
    for name in ("a_plugin", "broken_plugin"):
        sys.modules.pop(name, None)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, plugin: str) -> None:
    """Two entry points of other packages, one of which cannot be imported."""
    points = [
        EntryPoint(n, v, registry.ENTRY_POINT_GROUP) for n, v in (("mine", "a_plugin:Mine"), ("bad", "broken_plugin:X"))
    ]
    monkeypatch.setattr(registry, "_offered", lambda: {point.name: point for point in points})


def test_a_class_can_be_named_by_its_module(plugin: str) -> None:
    assert registry.get_transport("a_plugin:Mine").name == "mine"


def test_other_packages_offer_transports_by_entry_point(offered: None) -> None:
    assert registry.get_transport("mine").name == "mine"
    assert {"mine", "bad", "nccl_reshard", "gather_broadcast"} <= set(registry.transport_names())


def test_an_unknown_name_lists_the_known_ones_and_what_failed_to_load(offered: None) -> None:
    with pytest.raises(registry.UnknownTransportError) as caught:
        registry.get_transport("nccl_reshrad")
    assert "mine" in caught.value.allowed
    assert (
        "bad failed to load: ModuleNotFoundError: No module named 'a_package_that_is_not_there'" in caught.value.allowed
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken_plugin:X", "No module named 'a_package_that_is_not_there'"),
        ("a_plugin:Nothing", "has no attribute 'Nothing'"),
        ("a_plugin:Empty", "lacks plan_options, direct_names, wire_name"),
        ("a_plugin:number", "3 is not a class"),
    ],
)
def test_a_plugin_that_is_no_transport_says_why(plugin: str, name: str, reason: str) -> None:
    with pytest.raises(registry.UnknownTransportError) as caught:
        registry.check_transport(name)
    assert reason in caught.value.allowed


def test_registering_twice_is_harmless_and_two_classes_of_one_name_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    @registry.register_transport("x")
    class First: ...

    assert registry.register_transport("x")(First) is First
    with pytest.raises(ValueError, match="First already"):

        @registry.register_transport("x")
        class Second: ...


def test_built_in_names_are_known_without_importing_them() -> None:
    registry.check_transport("nccl_reshard")
    registry.check_transport(None)
