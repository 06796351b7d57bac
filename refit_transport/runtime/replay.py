"""A bound program: messages as runs of memory, and the copies around them, ready to be replayed at every refit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from refit_transport.planning.plan import Link

Target = torch.Tensor | Callable[[], torch.Tensor]
"""A live tensor to write into, or what gives one that exists only for a part of a refit."""


@dataclass(slots=True)
class Copies:
    """Pairs of tensors of equal shape, any strides and dtypes, copied in one call."""

    dst: list[torch.Tensor] = field(default_factory=list)
    src: list[torch.Tensor] = field(default_factory=list)
    late: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = field(default_factory=list)
    """Copies whose destination is asked for at the moment of the copy."""
    then: Callable[[], None] | None = None
    """Called once the copies are made, or at once when there are none."""

    def add(self, dst: Target, src: torch.Tensor) -> None:
        if isinstance(dst, torch.Tensor):
            self.dst.append(dst)
            self.src.append(src)
        else:
            self.late.append((dst, src))

    def run(self) -> None:
        if self.dst:
            torch._foreach_copy_(self.dst, self.src)
        if self.late:
            torch._foreach_copy_([give() for give, _ in self.late], [src for _, src in self.late])
        if self.then is not None:
            self.then()

    def __len__(self) -> int:
        return len(self.dst) + len(self.late)


@dataclass(slots=True)
class BoundMessage:
    """One message of one bucket."""

    peer: int
    hop: int
    link: Link
    nbytes: int
    segments: list[torch.Tensor]
    """uint8, 1-D, contiguous; their concatenation is the message. Empty for a message that is read where its sender
    staged it, until ``Binding.attach``."""
    pack: Copies = field(default_factory=Copies)
    """Sent messages: the part of the bucket's ``pack`` that is this message's own."""
    shares: tuple[int, ...] = ()
    """Sent messages: indices into the bucket's ``sends`` of the messages whose packed data this one carries as well."""
    unpack: Copies = field(default_factory=Copies)
    """Received messages: what to copy once it is complete."""
    needs: tuple[int, ...] = ()
    """Sent messages: indices into the bucket's ``recvs`` of the messages that this one forwards from."""
    in_place: bool = False
    """Received messages: the sender's staging is read where it lies; nothing is received into ``segments``."""
    relayed: bool = False
    """With ``in_place``: the message is forwarded, so ``fetch`` first copies it into ``segments``."""
    fetch: Copies = field(default_factory=Copies)


@dataclass(slots=True)
class BoundBucket:
    """One bucket of one rank, in the order of its program."""

    sends: list[BoundMessage]
    recvs: list[BoundMessage]
    pack: Copies
    """All that is packed for the bucket, for wires that do not pack message by message."""
    local: Copies
    local_bytes: int
    direct: tuple[str, ...]
    """Names that this rank holds directly and that are complete after this bucket."""
    whole: list[tuple[str, torch.Tensor]]
    """Full tensors that are complete after this bucket, in the dtype of the engine."""
