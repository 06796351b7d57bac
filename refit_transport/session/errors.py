"""Errors of a session, and the record that travels when one rank fails."""

from __future__ import annotations


class RefitError(RuntimeError):
    """A refit, or the set-up of a session, failed on some rank. The text names rank, phase and cause; every rank of the
    session raises it. The session is over afterwards: leave, and join a new one."""


class HandshakeError(RefitError):
    """The two sides cannot work together: versions, options, membership or plans differ."""
