"""How many ranks cut what: the sizes of a training and of a generation layout, read from ``tp=8,ep=16`` and checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd


class LayoutSizeError(ValueError):
    """Every violation found in one layout description, one per line."""


@dataclass(frozen=True, slots=True)
class Training:
    """Sizes of a training layout. ``dp=0`` means: as few data-parallel replicas as the expert layout needs.

    With ``fsdp`` 0 the layout is Megatron's (ranks ordered tensor, context, data, pipeline; experts over expert-tensor
    times expert parallelism). With ``fsdp`` above 0 it is FSDP2's: ``dp`` replicas of ``fsdp`` shards of ``tp`` cuts.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    dp: int = 0
    cp: int = 1
    fsdp: int = 0

    @property
    def expert_tp(self) -> int:
        """Ranks that cut one expert: 1 unless ``etp`` says otherwise (as in recent mixture-of-experts recipes)."""
        return self.etp or 1

    @property
    def replicas(self) -> int:
        if self.dp:
            return self.dp
        if self.fsdp:
            return 1
        experts, dense = self.ep * self.expert_tp, self.tp * self.cp
        return experts // gcd(experts, dense)

    @property
    def world(self) -> int:
        return self.tp * self.replicas * (self.fsdp or self.cp * self.pp)

    def violations(self) -> list[str]:
        found = _positive(self, "--train", zero_ok=("dp", "etp", "fsdp"))
        if found:
            return found
        if self.fsdp and (self.pp > 1 or self.ep > 1 or self.expert_tp > 1 or self.vpp > 1 or self.cp > 1):
            found.append("--train: fsdp combines with tp and dp only; got pp, ep, etp, vpp or cp above 1")
        elif not self.fsdp and (self.tp * self.cp * self.replicas) % (self.ep * self.expert_tp):
            found.append(
                f"--train: tp*cp*dp = {self.tp * self.cp * self.replicas} ranks of a pipeline stage do not divide by "
                f"ep*etp = {self.ep * self.expert_tp}; set dp to a multiple of "
                f"{self.ep * self.expert_tp // gcd(self.ep * self.expert_tp, self.tp * self.cp)}"
            )
        return found

    def __str__(self) -> str:
        return _label(self, fsdp=self.fsdp, tp=self.tp, cp=self.cp, pp=self.pp, vpp=self.vpp, ep=self.ep,
                      etp=self.expert_tp, dp=self.replicas)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Generation:
    """Sizes of a generation layout: ``dp`` engines of ``tp`` times ``pp`` ranks; experts whole over ``ep`` ranks when
    ``ep`` is above 1 (a multiple of ``tp``, reaching over several data-parallel engines), cut by ``tp`` otherwise."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def violations(self) -> list[str]:
        found = _positive(self, "--gen")
        if not found and self.ep > 1 and (self.ep % self.tp or (self.tp * self.dp) % self.ep):
            found.append(
                f"--gen: ep = {self.ep} must be 1, or a multiple of tp = {self.tp} that divides "
                f"tp*dp = {self.tp * self.dp}"
            )
        return found

    def __str__(self) -> str:
        return _label(self, tp=self.tp, pp=self.pp, ep=self.ep, dp=self.dp)


def parse_sizes(text: str, kind: type[Training] | type[Generation], option: str) -> tuple[dict[str, int], list[str]]:
    """``"tp=8,ep=16"`` as a dictionary, and every violation: unknown or repeated keys, values that are no integers."""
    known = [field.name for field in fields(kind)]
    sizes: dict[str, int] = {}
    found: list[str] = []
    for item in filter(None, (part.strip() for part in text.replace(" ", ",").split(","))):
        key, sign, value = item.partition("=")
        if key not in known:
            found.append(f"{option}: unknown size {key!r} in {item!r}; allowed: {', '.join(known)}")
        elif not sign or not value.isdigit():
            found.append(f"{option}: {item!r} is not {key}=NUMBER")
        elif key in sizes:
            found.append(f"{option}: {key} is given twice")
        else:
            sizes[key] = int(value)
    return sizes, found


def read_layout(text: str, kind: type[Training] | type[Generation], option: str) -> Training | Generation:
    """The layout that ``text`` describes.

    Raises:
        LayoutSizeError: naming every violation at once.
    """
    sizes, found = parse_sizes(text, kind, option)
    layout = kind(**sizes)
    found += layout.violations()
    if found:
        raise LayoutSizeError("\n".join(found))
    return layout


def _positive(layout: Training | Generation, option: str, zero_ok: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{option}: {field.name} must be at least 1, got {getattr(layout, field.name)}"
        for field in fields(layout)
        if getattr(layout, field.name) < (0 if field.name in zero_ok else 1)
    ]


def _label(layout: Training | Generation, **sizes: int) -> str:
    parts = [f"{name.upper()}{size}" for name, size in sizes.items() if size > 1]
    return " x ".join(parts) or "1 rank"
