"""Several hosts on one machine: network namespaces with separate networks between them; needs root.

A host has its own interfaces, /etc/hosts and name. Its processes share the file system with all other hosts, except for
its disk, if it has one.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.link import Link, Relay, has_netem, netem_words

ETC = Path("/etc/netns")
OF_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "HCCL_IF_IP")


def why_not() -> str | None:
    """Why this machine cannot simulate several hosts; None if it can."""
    if shutil.which("ip") is None:
        return "no `ip`: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"arl{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are not permitted here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


@dataclass(frozen=True, slots=True)
class Disks:
    """A directory whose content differs from host to host, and with it /dev/shm.

    Args:
        path: where each host sees its own disk; empty outside.
        shared: names of directories in it that some hosts share, as on a file server, with these hosts.
    """

    path: Path
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, host: str) -> Path:
        """Where the disk of a host lies outside."""
        return self.path.with_name(f"{self.path.name}-of-{host}")

    def on_server(self, name: str) -> Path:
        """Where a shared directory lies outside."""
        return self.path.with_name(f"{self.path.name}-shared") / name

    def mounts(self, host: str) -> dict[Path, Path]:
        """What is mounted on a host, by the place; makes the directories."""
        own = self.of(host)
        names = [name for name, hosts in self.shared.items() if host in hosts]
        found = {self.path: own, Path("/dev/shm"): own / "shm"}
        found |= {self.path / name: self.on_server(name) for name in names}
        for directory in [self.path, *found.values(), *(own / name for name in names)]:
            directory.mkdir(parents=True, exist_ok=True)
        return found


class Host:
    """One host.

    Args:
        addresses: of its interfaces, by network.
        switch: the namespace of the other ends of its links.
        ports: the names of these ends, by network.
        mounts: directories, by where they are mounted on this host.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        addresses: Mapping[str, str],
        switch: str,
        ports: Mapping[str, str],
        mounts: Mapping[Path, Path],
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.addresses = dict(addresses)
        self._switch = switch
        self._ports = ports
        self._mounts = mounts

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on this host."""
        # `ip netns exec` makes a mount namespace for each command.
        steps = [["mount", "--bind", str(what), str(where)] for where, what in self._mounts.items()]
        inside = " && ".join(shlex.join(step) for step in [*steps, ["hostname", self.name], ["exec", *words]])
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", inside]

    def cut(self, network: str) -> None:
        """Takes the link to a network down; connections stay open on both sides, and nothing arrives."""
        _ip("-n", self.namespace, "link", "set", network, "down")

    def restore(self, network: str) -> None:
        _ip("-n", self.namespace, "link", "set", network, "up")

    def isolate(self, network: str) -> None:
        """As `cut`, but in the network: the host's own interface and routes stay up."""
        _ip("-n", self._switch, "link", "set", self._ports[network], "down")

    def reconnect(self, network: str) -> None:
        _ip("-n", self._switch, "link", "set", self._ports[network], "up")

    def ask(self, *words: str) -> str:
        """The output of a command on this host."""
        done = subprocess.run(self.command(words), check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()


class Hosts:
    """A set of hosts and the networks between them, made by the constructor and removed by `close`.

    Each network is a bridge in a separate namespace, without a route to other networks.
    """

    def __init__(
        self,
        networks: Mapping[str, str],
        hosts: Mapping[str, Mapping[str, str]],
        links: Mapping[str | tuple[str, str], Link] | None = None,
        disks: Disks | None = None,
    ) -> None:
        """
        Args:
            networks: prefix lengths by network name.
            hosts: by name, each host's address in every network it is part of. The host's own name resolves to its
                first address; a key that is not a network may give a loopback address for that.
            links: by network, what each host's link to it is like, or by host and network what that one is like; see
                `benchmarks.common.link.why_no_link`.
            disks: by default the hosts share the file system.
        """
        self._prefix = f"arl{os.getpid()}-"
        self._namespaces: list[str] = []
        self._relays: list[Relay] = []
        self._links = links or {}
        self._disks = disks
        self.hosts: dict[str, Host] = {}
        try:
            switch = self._namespace("switch")
            for network in networks:
                _ip("-n", switch, "link", "add", network, "type", "bridge")
                _ip("-n", switch, "link", "set", network, "up")
            for name, addresses in hosts.items():
                self.hosts[name] = self._host(name, addresses, networks, switch)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def close(self) -> None:
        for relay in self._relays:
            relay.close()
        self._relays = []
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)
            shutil.rmtree(ETC / namespace, ignore_errors=True)
        self._namespaces = []

    def _namespace(self, name: str) -> str:
        namespace = self._prefix + name
        _ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    def _host(self, name: str, addresses: Mapping[str, str], networks: Mapping[str, str], switch: str) -> Host:
        namespace = self._namespace(name)
        ports = {network: f"{network}-{len(self.hosts)}" for network in addresses if network in networks}
        for network, port in ports.items():
            self._connect(namespace, network, switch, port, self._links.get((name, network), self._links.get(network)))
            _ip("-n", switch, "link", "set", port, "master", network, "up")
            _ip("-n", namespace, "address", "add", addresses[network] + networks[network], "dev", network)
            _ip("-n", namespace, "link", "set", network, "up")
        own = next(iter(addresses.values()))
        etc = ETC / namespace
        etc.mkdir(parents=True)
        # `ip netns exec` mounts the files of this folder under /etc.
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{own} {name}\n")
        (etc / "resolv.conf").write_text("")
        mounts = self._disks.mounts(name) if self._disks else {}
        return Host(namespace, name, {network: addresses[network] for network in ports}, switch, ports, mounts)

    def _connect(self, namespace: str, network: str, switch: str, port: str, link: Link | None) -> None:
        """Makes the two ends of a host's link: `network` in its namespace, and `port` at the switch."""
        if link is None or has_netem():
            _ip("-n", namespace, "link", "add", network, "type", "veth", "peer", "name", port, "netns", switch)
            if link is not None:
                for where, end in ((namespace, network), (switch, port)):
                    _run("tc", "-n", where, "qdisc", "add", "dev", end, "root", *netem_words(link))
            return
        # Names of this namespace, which has other devices.
        ends = [f"arl{os.getpid() % 10**6}-{2 * len(self._relays) + i}" for i in range(2)]
        self._relays.append(Relay(ends, link))
        for end, where, name in zip(ends, (namespace, switch), (network, port), strict=True):
            _ip("link", "set", end, "netns", where, "name", name)


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, without the variables that select interfaces."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_INTERFACES}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
