"""Runs the containers of rendered manifests as processes, one pod on each host of `benchmarks.common.hosts`.

What a kubelet does is done here: variables from fields and secrets, `$(NAME)` in commands, volumes and mounts, the
working directory, a read-only root file system, a user without rights, DNS names of headless services. The image is
this checkout and the environment of these tests, laid over the host's own file system.
"""

import base64
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.hosts import ETC, Host, Hosts, why_not
from tests.support import ROOT

CHECKOUT = "/image/checkout"
ENVIRONMENT = "/image/environment"
IMAGE_ENV = {"PATH": f"{ENVIRONMENT}/bin:/usr/bin:/bin", "PYTHONPATH": CHECKOUT, "PYTHONDONTWRITEBYTECODE": "1"}

Object = Mapping[str, Any]

MOUNT_ROOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
root=/mnt/root
mount --rbind /proc $root/proc
mount --rbind /dev $root/dev
mount --bind /etc/hosts $root/etc/hosts
mount --bind /etc/resolv.conf $root/etc/resolv.conf
"""

ENTER_ROOT = """
mount -o remount,ro $root
cd $root
pivot_root . mnt
umount -l /mnt
cd {directory}
exec unshare --user --map-user={user} --map-group={group} {command}
"""


def why_no_pods() -> str | None:
    """Why pods cannot be run here; None if they can."""
    reason = why_not()
    if reason is not None:
        return reason
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", MOUNT_ROOT], capture_output=True, text=True)
    return f"mounts are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Pod:
    """One pod: `dns` is what its headless service calls it, `added` are the variables that controllers add."""

    name: str
    dns: str
    spec: Object
    added: Mapping[str, str]


def pods_of(objects: Sequence[Object]) -> Iterator[Pod]:
    """The pods that the controllers of JobSet and StatefulSet make."""
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "JobSet":
            for job in spec["replicatedJobs"]:
                template = job["template"]["spec"]
                for i in range(template["completions"]):
                    host = f"{name}-{job['name']}-0-{i}"
                    index = {"JOB_COMPLETION_INDEX": str(i)}
                    yield Pod(
                        f"{host}-x7k2p", f"{host}.{spec['network']['subdomain']}", template["template"]["spec"], index
                    )
        elif each["kind"] == "StatefulSet":
            for i in range(spec["replicas"]):
                yield Pod(f"{name}-{i}", f"{name}-{i}.{spec['serviceName']}", spec["template"]["spec"], {})


class PodRunner:
    """Runs the pods of a release, each on a host of its own, until `close`; their logs are `folder`/NAME.log.

    Args:
        objects: all of the release.
        volume: what the claim's volume is here.
        folder: for logs and for the pods' own volumes.
    """

    def __init__(self, objects: Sequence[Object], volume: Path, folder: Path) -> None:
        self.pods = list(pods_of(objects))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.attempt = 0
        """How often JobSet has started the training pods again, as they are told."""
        self._num_anew = 0
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self._volume = volume
        self._folder = folder
        addresses = {pod.dns.partition(".")[0]: f"10.79.1.{i + 1}" for i, pod in enumerate(self.pods)}
        self._hosts = Hosts({"pods": "/24"}, {name: {"pods": address} for name, address in addresses.items()})
        # The name of a headless service leads to all its pods.
        names = "".join(f"{self.address(pod)} {pod.dns} {pod.dns.partition('.')[2]}\n" for pod in self.pods)
        for pod in self.pods:
            with (ETC / self.host(pod).namespace / "hosts").open("a") as file:
                file.write(names)

    def host(self, pod: Pod) -> Host:
        return self._hosts[pod.dns.partition(".")[0]]

    def address(self, pod: Pod) -> str:
        return self.host(pod).addresses["pods"]

    def log(self, pod: Pod) -> str:
        return (self._folder / f"{pod.name}.log").read_text(errors="replace")

    def start(self, pod: Pod) -> subprocess.Popen[bytes]:
        """Starts the pod's only container; the process is its first one."""
        [container] = pod.spec["containers"]
        env = IMAGE_ENV | dict(self._environment(pod, container))
        words = [_expanded(word, env) for word in container["args"]]
        words[0] = f"{ENVIRONMENT}/bin/{words[0]}" if "/" not in words[0] else words[0]
        security = pod.spec["securityContext"]
        enter = ENTER_ROOT.format(
            directory=shlex.quote(container["workingDir"]),
            user=security["runAsUser"],
            group=security["runAsGroup"],
            command=shlex.join(["env", "-i", *(f"{key}={value}" for key, value in env.items()), *words]),
        )
        assert container["securityContext"]["readOnlyRootFilesystem"], "the root file system is mounted so"
        script = MOUNT_ROOT + "".join(self._mounts(pod, container)) + enter
        with (self._folder / f"{pod.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.host(pod).command(["unshare", "--mount", "sh", "-c", script]), stdout=log, stderr=subprocess.STDOUT
            )
        self.running[pod.name] = process
        return process

    def get(self, pod: Pod, port_name: str, path: str) -> str:
        """The body of a GET request from the pod's own host, at the named port; empty if it failed."""
        [container] = pod.spec["containers"]
        [port] = [each["containerPort"] for each in container["ports"] if each["name"] == port_name]
        url = f"http://{self.address(pod)}:{port}{path}"
        code = f"import urllib.request as u; print('200', u.urlopen({url!r}, timeout=5).read().decode())"
        done = subprocess.run(self.host(pod).command([sys.executable, "-c", code]), capture_output=True, text=True)
        return done.stdout

    def ask(self, pod: Pod, *words: str) -> str:
        """The output of a program of the project on the pod's host, with the pod's variables, in the volume."""
        [container] = pod.spec["containers"]
        env = [f"{name}={value}" for name, value in self._environment(pod, container)]
        command = self.host(pod).command(["env", f"PYTHONPATH={ROOT}", *env, sys.executable, *words])
        return subprocess.run(command, cwd=self._volume, check=True, capture_output=True, text=True).stdout

    def lose(self, pod: Pod) -> None:
        """Ends all processes of the pod at once."""
        left = subprocess.run(["ip", "netns", "pids", self.host(pod).namespace], capture_output=True, text=True)
        if left.stdout.split():
            subprocess.run(["kill", "-KILL", *left.stdout.split()], check=False)
        self.running[pod.name].wait()

    def start_again(self, pod: Pod) -> None:
        """Makes a pod that has ended anew: at another address, to which its name leads from now on."""
        self._num_anew += 1
        host, old, new = self.host(pod), self.address(pod), f"10.79.1.{100 + self._num_anew}"
        for change in (["del", f"{old}/24"], ["add", f"{new}/24"]):
            subprocess.run(["ip", "-n", host.namespace, "addr", *change, "dev", "pods"], check=True)
        host.addresses["pods"] = new
        for each in self.pods:
            # In place: the pods that run have this file mounted.
            file = ETC / self.host(each).namespace / "hosts"
            file.write_text(file.read_text().replace(f"{old} ", f"{new} "))
        self.start(pod)

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
        for pod in self.pods:
            # A container's other processes end with it; here they are those of its namespace.
            if pod.name in self.running:
                self.lose(pod)
        self._hosts.close()

    def _environment(self, pod: Pod, container: Object) -> Iterator[tuple[str, str]]:
        yield from pod.added.items()
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                yield each["name"], self._field(pod, source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                asked = source["secretKeyRef"]
                content = self._objects["Secret", asked["name"]]["data"][asked["key"]]
                yield each["name"], base64.b64decode(content).decode()
            else:
                yield each["name"], each["value"]

    def _field(self, pod: Pod, path: str) -> str:
        """A field of the pod, which Kubernetes and JobSet fill in."""
        return {
            "metadata.name": pod.name,
            "spec.nodeName": f"node-of-{pod.name}",
            "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(self.attempt),
        }[path]

    def _mounts(self, pod: Pod, container: Object) -> Iterator[str]:
        for source, target in ((ROOT, CHECKOUT), (Path(sys.prefix), ENVIRONMENT)):
            yield _bind(source, target, read_only=True)
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                yield f"mount -t tmpfs -o mode=1777 none $root{shlex.quote(mount['mountPath'])}\n"
            else:
                source = self._content(pod, volume)
                yield _bind(source, mount["mountPath"], read_only=mount.get("readOnly", False))

    def _content(self, pod: Pod, volume: Object) -> Path:
        """The folder that stands for a volume."""
        if "persistentVolumeClaim" in volume:
            assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in self._objects
            return self._volume
        folder = self._folder / f"{pod.name}-{volume['name']}"
        folder.mkdir(exist_ok=True)
        for name, text in self._objects["ConfigMap", volume["configMap"]["name"]]["data"].items():
            (folder / name).write_text(text)
        return folder


def _bind(source: Path, target: str, *, read_only: bool) -> str:
    """Commands that mount a folder at a path of the pod."""
    at = f"$root{shlex.quote(target)}"
    lines = f"mkdir -p {at}\nmount --bind {shlex.quote(str(source))} {at}\n"
    return lines + (f"mount -o remount,bind,ro {at}\n" if read_only else "")


def _expanded(word: str, env: Mapping[str, str]) -> str:
    """Kubernetes' own syntax: `$(NAME)` is replaced where NAME is a variable of the container, else left as it is; `$$`
    stands for `$`."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else env.get(found[2], found[0]), word)
