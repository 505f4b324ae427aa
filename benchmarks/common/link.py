"""Links with a delay, a rate and loss between hosts that are network namespaces, for `benchmarks.common.hosts`.

The kernel's netem does it where it exists. Otherwise the link is two TAP devices with a process between them
(`benchmarks.common.link_relay`), which carries frames of up to 64 KiB as the kernel does for segmentation offload, so
that it keeps up with a gigabit per second.
"""

import fcntl
import functools
import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TUN = Path("/dev/net/tun")

# Of linux/if_tun.h.
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
TAP_FLAGS = 0x0002 | 0x1000 | 0x4000
"""IFF_TAP, IFF_NO_PI and IFF_VNET_HDR."""
OFFLOADS = 0x01 | 0x02 | 0x04
"""Checksums and segmentation of TCP over IPv4 and IPv6 are left to whoever reads a frame, who is the next kernel."""


@dataclass(frozen=True, slots=True)
class Link:
    """A host's link to its network, the same in both directions; the way between two hosts has two of them.

    `loss` is the share of frames that do not arrive, `bits_per_s` None for no limit.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    bits_per_s: float | None = None


def why_no_link() -> str | None:
    """Why this machine cannot have such links; None if it can."""
    if has_netem() or TUN.exists():
        return None
    return f"links with a delay need the kernel's netem (sch_netem) or {TUN}"


@functools.cache
def has_netem() -> bool:
    """Whether `tc` can delay packets here; tried on the loopback device of a new namespace."""
    tried = "tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True).returncode == 0


def netem_words(link: Link) -> list[str]:
    """The arguments of netem for one direction of the link."""
    words = ["netem", "limit", "100000", "delay", f"{link.delay_s * 1e6:.0f}us", "loss", f"{100 * link.loss:g}%"]
    return words if link.bits_per_s is None else [*words, "rate", f"{link.bits_per_s:.0f}bit"]


class Relay:
    """A link as two TAP devices of this namespace, to be moved to where they belong, until `close`.

    It keeps the devices while it runs; they vanish with it.
    """

    def __init__(self, names: Sequence[str], link: Link) -> None:
        files = [_open_tap(name) for name in names]
        try:
            words = [sys.executable, "-m", "benchmarks.common.link_relay", json.dumps(asdict(link)), *map(str, files)]
            self._process = subprocess.Popen(words, pass_fds=files)
        finally:
            for file in files:
                os.close(file)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _open_tap(name: str) -> int:
    file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_FLAGS))
        fcntl.ioctl(file, TUNSETOFFLOAD, OFFLOADS)
    except OSError as error:
        os.close(file)
        raise AssertionError(f"the TAP device {shlex.quote(name)} cannot be made: {error}") from error
    return file
