"""The links between hosts delay, lose and limit what they were told to; measured with plain sockets."""

import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.common.hosts import Disks, Hosts, why_not
from benchmarks.common.link import Link, netem_words, why_no_link
from tests.support.programs import Programs

pytestmark = pytest.mark.distributed

ECHO = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 5001))
print("ready", flush=True)
while True:
    server.sendto(*server.recvfrom(2000))
"""
PING = """
import socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(0.25)
client.connect((sys.argv[1], 5001))
for number in range(int(sys.argv[2])):
    begun_s = time.monotonic()
    client.send(b"%d" % number)
    try:
        while int(client.recv(2000)) != number:
            pass
        print(time.monotonic() - begun_s)
    except TimeoutError:
        pass
"""
COUNT = """
import socket, time
server = socket.create_server(("0.0.0.0", 5002))
print("ready", flush=True)
connection, _ = server.accept()
arrivals = []
while data := connection.recv(2**20):
    arrivals.append((time.monotonic(), len(data)))
print(8 * sum(length for _, length in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0]), flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5002)) as client:
    client.sendall(bytes(int(sys.argv[2])))
"""
ADDRESSES = {"a": {"net": "10.82.1.1"}, "b": {"net": "10.82.1.2"}}


@pytest.fixture
def linked() -> Iterator[Callable[[Link], Hosts]]:
    """Two hosts with such links."""
    if (reason := why_not() or why_no_link()) is not None:
        pytest.skip(reason)
    made: list[Hosts] = []

    def make(link: Link) -> Hosts:
        made.append(Hosts({"net": "/24"}, ADDRESSES, {"net": link}))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


def round_trips_s(hosts: Hosts, programs: Programs, tmp_path: Path, number: int) -> list[float]:
    """Of the datagrams that came back."""
    programs.start(hosts["b"], [sys.executable, "-c", ECHO], tmp_path / "echo.txt")
    programs.wait_for(tmp_path / "echo.txt", "ready")
    return [float(line) for line in hosts["a"].ask(sys.executable, "-c", PING, "10.82.1.2", str(number)).split()]


def test_a_link_delays_each_way_and_loses_nothing(
    linked: Callable[[Link], Hosts], programs: Programs, tmp_path: Path
) -> None:
    times_s = round_trips_s(linked(Link(delay_s=0.005)), programs, tmp_path, 50)
    assert len(times_s) == 50
    # Four links there and back. Other processes of this machine may add to a few, but nothing takes less.
    assert min(times_s) >= 0.020
    assert statistics.median(times_s) < 0.030


def test_a_link_loses_its_share_of_frames(linked: Callable[[Link], Hosts], programs: Programs, tmp_path: Path) -> None:
    times_s = round_trips_s(linked(Link(loss=0.05)), programs, tmp_path, 150)
    # Four links with 5% each leave 0.81 of 150, that is 122; the limits are five standard deviations of 4.8 away.
    assert 98 <= len(times_s) <= 146


def test_a_link_carries_its_rate(linked: Callable[[Link], Hosts], programs: Programs, tmp_path: Path) -> None:
    hosts = linked(Link(bits_per_s=80e6))
    programs.start(hosts["b"], [sys.executable, "-c", COUNT], tmp_path / "count.txt")
    programs.wait_for(tmp_path / "count.txt", "ready")
    hosts["a"].ask(sys.executable, "-c", SEND, "10.82.1.2", str(20 * 10**6))
    (bits_per_s,) = programs.wait_for(tmp_path / "count.txt", "ready", after=".").split()[1:]
    # Headers take 4.5%; TCP may use less, and never more, but for what the first link's queue held at the beginning.
    assert 0.6 * 80e6 < float(bits_per_s) < 1.02 * 80e6


def test_hosts_with_disks_share_only_what_they_are_to_share(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    disks = Disks(tmp_path / "disk", {"run": ("a", "b")})
    hosts = Hosts({"net": "/24"}, ADDRESSES | {"c": {"net": "10.82.1.3"}}, disks=disks)
    try:
        for name in ("a", "c"):
            hosts[name].ask("sh", "-c", f"touch {disks.path}/of-{name} /dev/shm/of-{name}")
        hosts["a"].ask("touch", f"{disks.path}/run/shared")
        assert hosts["b"].ask("ls", f"{disks.path}", f"{disks.path}/run").split() == [
            f"{disks.path}:", "run", "shm", f"{disks.path}/run:", "shared",
        ]  # fmt: skip
        assert hosts["c"].ask("ls", f"{disks.path}", "/dev/shm").split() == [
            "/dev/shm:", "of-c", f"{disks.path}:", "of-c", "shm",
        ]  # fmt: skip
        assert not list(disks.path.iterdir())
        assert [path.name for path in disks.on_server("run").iterdir()] == ["shared"]
    finally:
        hosts.close()


def test_where_the_kernel_has_netem_it_is_told_the_same() -> None:
    words = netem_words(Link(delay_s=0.005, loss=0.002, bits_per_s=1e9))
    assert " ".join(words) == "netem limit 100000 delay 5000us loss 0.2% rate 1000000000bit"
