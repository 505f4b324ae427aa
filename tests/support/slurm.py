"""A real Slurm cluster for tests: munged, slurmctld and a slurmd for each node, as this user, who must be root.

All nodes are on this host, or each on a simulated one (`hosts.py`). Every daemon runs in the foreground as a child of
the test, and ends with it.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from async_rl.shared.programs.process_guard import end_with_parent
from benchmarks.common.hosts import Host, environment
from tests.support.waiting import wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
WAIT_S = 60.0
FIRST_PORT = 17601
"""Of the nodes that share this host."""

CPUS = 4
"""Of each node, by its configuration."""

CONFIG = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmctldPort=17600
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for the end of its old credentials: 120 s by default.
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={node_timeout_s}
KillWait=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
# The least loaded node first, so that instances spread.
PartitionName=all Nodes=ALL Default=YES State=UP LLN=YES
"""


def why_not() -> str | None:
    """Why there can be no Slurm cluster here; None if there can."""
    missing = [name for name in (*DAEMONS, "sbatch") if shutil.which(name) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends {packages}"
    return None if os.geteuid() == 0 else "Slurm's daemons start jobs of any user as root only"


class Slurm:
    """A cluster whose `nodes` are hosts by name, None for this one; the first node is the controller, too.

    `close` ends the daemons and everything that they started.
    """

    def __init__(self, nodes: Mapping[str, Host | None], node_timeout_s: int = 10) -> None:
        # A short path: that of a socket is limited to 107 characters.
        self._dir = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._nodes = dict(nodes)
        self._controller = next(iter(nodes.values()))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {"SLURM_CONF": str(self._dir / "slurm.conf")}
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (self._dir / name).mkdir()
        self._write_config(node_timeout_s)
        try:
            self._start_munge()
            self._start("slurmctld", ["slurmctld", "-D", "-c"], self._controller)
            for node, host in nodes.items():
                self._start(f"slurmd-{node}", ["slurmd", "-D", "-N", node], host)
            self.wait_for(lambda: set(self.nodes()) == set(nodes) and set(self.nodes().values()) == {"idle"})
        except BaseException:
            self.close()
            raise

    def nodes(self) -> dict[str, str]:
        """The state of every node: idle, allocated, down*, ..."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(map(str.split, lines))

    def jobs(self, job: str) -> dict[str, str]:
        """The states of a job, or of an array's tasks, that are not over, by id."""
        lines = self.ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        states = dict(map(str.split, lines))
        return {name: state for name, state in states.items() if name.partition("_")[0] == job}

    def ask(self, *words: str) -> str:
        """The output of a command of Slurm on the first node; empty if it fails."""
        done = subprocess.run(self.command(words), capture_output=True, text=True, timeout=60, env=self.env())
        return done.stdout.strip() if done.returncode == 0 else ""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` on the first node."""
        return list(words) if self._controller is None else self._controller.command(words)

    def env(self) -> dict[str, str]:
        return environment(**self.environment)

    def processes(self) -> list[psutil.Process]:
        """All daemons, and all processes of all jobs."""
        return [process for process in psutil.process_iter() if self._is_own(process)]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        wait_for(condition, timeout_s, self.everything_said)

    def everything_said(self) -> str:
        queue = self.ask("squeue", "--array") + "\n" + self.ask("sinfo", "--Node")
        return queue + "".join(
            f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self._dir.glob("*.log"))
        )

    def close(self) -> None:
        # What is left by one pass was just being started.
        while found := self.processes():
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            for daemon in self._daemons:
                daemon.wait()
            psutil.wait_procs(found, timeout=60)
        shutil.rmtree(self._dir, ignore_errors=True)

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            return is_alive and process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
        except psutil.Error:
            return False

    def _start(self, name: str, words: Sequence[str], host: Host | None) -> None:
        with (self._dir / f"{name}.log").open("wb") as log:
            command = list(words) if host is None else host.command(words)
            self._daemons.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=self.env(), preexec_fn=end_with_parent
                )
            )

    def _start_munge(self) -> None:
        key = self._dir / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        files = [f"--{option}={self._dir / name}" for option, name in names.items()]
        self._start("munged", ["munged", "--foreground", "--force", *files], None)
        self.wait_for((self._dir / "munge.socket").exists)

    def _write_config(self, node_timeout_s: int) -> None:
        host = self._controller
        name = socket.gethostname().partition(".")[0] if host is None else host.name
        address = "127.0.0.1" if host is None else next(iter(host.addresses.values()))
        lines = [CONFIG.format(controller=name, address=address, dir=self._dir, node_timeout_s=node_timeout_s)]
        for i, (node, host) in enumerate(self._nodes.items()):
            if host is None:
                where = f"NodeHostname={name} NodeAddr=127.0.0.1 Port={FIRST_PORT + i}"
            else:
                where = f"NodeAddr={next(iter(host.addresses.values()))}"
            lines.append(f"NodeName={node} {where} CPUs={CPUS} RealMemory=1000")
        (self._dir / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self._dir / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
