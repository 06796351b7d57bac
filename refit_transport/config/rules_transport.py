"""Rules on the transport's name: it has to be registered, or importable, and to be one."""

from __future__ import annotations

from collections.abc import Iterator

from refit_transport.config.key import DOCUMENT
from refit_transport.config.setup import Setup
from refit_transport.config.violation import Violation

KEY = "policy.generation.refit_transport"


def transport_rules(setup: Setup) -> Iterator[Violation]:
    """Names that the registry cannot resolve, with what is registered and what failed to load. Imports the class only
    of a ``module:ClassName`` plug-in; the built-in ones are known by name."""
    from refit_transport.transports.registry import UnknownTransportError, check_transport

    name = setup.get(KEY)
    try:
        check_transport(name)
    except UnknownTransportError as error:
        yield Violation(KEY, name, error.allowed, f"{DOCUMENT}#policy-generation-refit-transport")
