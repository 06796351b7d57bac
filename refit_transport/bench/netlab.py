"""An emulated cluster on one machine: a namespace per network card, shaped to a rate, with exact byte counters.

The cards hang on a bridge in a namespace of its own that has no uplink, so nothing can leave the machine and the
routes of the host stay as they are. Cards of one domain may share a second, unshaped network: the fast link.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

PREFIX = "rtlab"
NAMESPACES = Path("/var/run/netns")
CLONE_NEWNET = 0x40000000
QUEUE_BYTES = 64 << 20
"""Deep enough that a shaped card drops nothing when several senders meet: the emulated fabric is lossless."""
BURST_BYTES = 256 << 10
FRAME_HEADER_BYTES = 66
"""Ethernet, IPv4 and TCP with timestamps. The kernel hands over large segments whole, so each is counted once."""
NETWORK_MTU, DOMAIN_MTU = 9000, 65000
WIRE_EFFICIENCY = (NETWORK_MTU - 52) / (NETWORK_MTU + 14)
"""Payload over wire bytes at that MTU: no flow can do better than this share of the rate."""

_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3, "bit": 1.0}


def parse_rate(text: str) -> float:
    """Bits per second of ``2gbit``, ``500mbit``. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([gmk]?bit)\s*", text.lower())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"rate: got {text!r}, allowed: a positive number with gbit, mbit or kbit, such as 2gbit")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class Counters:
    """What a card sent and received since the lab came up; ``payload`` leaves the frame headers out."""

    sent: int
    received: int
    sent_packets: int
    received_packets: int

    def since(self, earlier: Counters) -> Counters:
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name in self.__slots__))

    @property
    def sent_payload(self) -> int:
        return self.sent - FRAME_HEADER_BYTES * self.sent_packets

    @property
    def received_payload(self) -> int:
        return self.received - FRAME_HEADER_BYTES * self.received_packets


def supported() -> str | None:
    """None when the lab can be built here, else the reason."""
    if os.geteuid() != 0:
        return "an emulated network needs root"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"{tool} is missing: install iproute2"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "a0", "type", "veth", "peer", "name", "b0")
        _run("ip", "-n", probe, "link", "add", "br0", "type", "bridge")
        _batch("tc", probe, [_shape("a0", 1e9)])
    except RuntimeError as error:
        return f"an emulated network cannot be built here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None


class Lab:
    """``cards`` namespaces with a card ``eth0`` each, shaped to ``rate`` bits per second both ways.

    ``domains`` lists the cards that share a fast, unshaped network ``nv0`` besides. Use as a context manager: the
    namespaces go when it ends, however it ends; those of a process that was killed go when the next lab comes up.
    """

    def __init__(self, cards: int, rate: float | None, domains: Sequence[Sequence[int]] = ()) -> None:
        self.cards, self.rate, self.domains = cards, rate, tuple(map(tuple, domains))
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._switch = f"{self._prefix}sw"

    def namespace(self, card: int) -> str:
        return f"{self._prefix}{card}"

    @staticmethod
    def address(card: int) -> str:
        return f"10.77.0.{card + 1}"

    def __enter__(self) -> Lab:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name in self._namespaces():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def counters(self) -> tuple[Counters, ...]:
        """Of every card, read inside its namespace without starting a process."""
        return tuple(run_inside(self._namespaces()[1:], _read_counters))

    def drops(self) -> int:
        """Packets that a shaping queue had to drop. Anything but zero means that the emulation itself was overrun."""
        listings = [
            _run("tc", "-s", "-n", namespace, "qdisc", "show", "dev", device)
            for card in range(self.cards)
            for namespace, device in self._shaped_ends(card)
        ]
        return sum(int(found) for text in listings for found in re.findall(r"dropped (\d+)", text))

    def link(self, card: int, up: bool) -> None:
        """Pull or plug the cable of a card."""
        _run("ip", "-n", self._switch, "link", "set", f"p{card}", "up" if up else "down")

    def _build(self) -> None:
        for name in self._namespaces():
            _run("ip", "netns", "add", name)
        run_inside(self._namespaces(), _quiet_stack)
        _batch("ip", self._switch, [_bridge("br0", NETWORK_MTU), "link set br0 up"])
        for card in range(self.cards):
            self._plug(card, "br0", f"p{card}", "eth0", self.address(card), NETWORK_MTU)
            _batch("ip", self.namespace(card), ["link set lo up", *self._neighbours(card)])
            if self.rate:
                for namespace, device in self._shaped_ends(card):
                    _batch("tc", namespace, [_shape(device, self.rate)])
        for number, members in enumerate(self.domains):
            _batch("ip", self._switch, [_bridge(f"nv{number}", DOMAIN_MTU), f"link set nv{number} up"])
            for card in members:
                self._plug(card, f"nv{number}", f"v{card}", "nv0", f"10.78.{number}.{card + 1}", DOMAIN_MTU)

    def _plug(self, card: int, bridge: str, port: str, device: str, address: str, mtu: int) -> None:
        name = self.namespace(card)
        pair = (
            f"link add {port} mtu {mtu} type veth peer name {device} mtu {mtu} address {_hardware(card)} netns {name}"
        )
        _batch("ip", self._switch, [pair, f"link set {port} master {bridge} up"])
        _batch("ip", name, [f"addr add {address}/24 dev {device}", f"link set {device} up"])

    def _neighbours(self, card: int) -> list[str]:
        """Static neighbour entries, so that the counters hold not one packet besides those of the refit."""
        others = [other for other in range(self.cards) if other != card]
        return [f"neigh replace {self.address(o)} lladdr {_hardware(o)} dev eth0 nud permanent" for o in others]

    def _namespaces(self) -> list[str]:
        return [self._switch, *map(self.namespace, range(self.cards))]

    def _shaped_ends(self, card: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.namespace(card), "eth0"), (self._switch, f"p{card}")


def enter_namespace(name: str) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(NAMESPACES / name) as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into network namespace {name}: {os.strerror(ctypes.get_errno())}")


def run_inside(names: Sequence[str], read: Callable[[], T]) -> list[T]:
    """``read()`` in each namespace, by a thread that ends afterwards: the caller stays where it is."""
    results: list[T] = []
    failures: list[BaseException] = []

    def visit() -> None:
        try:
            for name in names:
                enter_namespace(name)
                results.append(read())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=visit, name="netlab-visit")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results


def remove_stale() -> list[str]:
    """Delete the namespaces of labs whose process is gone; returns their names."""
    listed = NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()
    owners = {path.name: re.fullmatch(rf"{PREFIX}(\d+)-\w+", path.name) for path in listed}
    stale = [name for name, owner in owners.items() if owner and not Path("/proc", owner[1]).exists()]
    for name in stale:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return stale


def _quiet_stack() -> None:
    """Reno, as unshaped links reach a quarter of their speed under bbr; no IPv6, whose discovery would be counted."""
    settings = {
        "ipv4/tcp_congestion_control": "reno",
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
    }
    for key, value in settings.items():
        path = Path("/proc/sys/net", key)
        if path.exists():
            path.write_text(value)


def _read_counters() -> Counters:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "eth0":
            field = list(map(int, numbers.split()))
            return Counters(sent=field[8], received=field[0], sent_packets=field[9], received_packets=field[1])
    raise RuntimeError("network namespace without a card eth0")


def _hardware(card: int) -> str:
    return f"02:00:00:00:{card >> 8:02x}:{card & 255:02x}"


def _bridge(name: str, mtu: int) -> str:
    return f"link add {name} mtu {mtu} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"


def _shape(device: str, rate: float) -> str:
    burst = max(BURST_BYTES, int(rate / 8 / 1000))
    return f"qdisc replace dev {device} root tbf rate {int(rate)}bit burst {burst}b limit {QUEUE_BYTES}b"


def _batch(tool: str, namespace: str, lines: Sequence[str]) -> None:
    _run(tool, "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def _run(*argv: str, text: str | None = None) -> str:
    """Output of a command. Raises RuntimeError with the command and what it said."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()} (exit {done.returncode})")
    return done.stdout
