"""The actor of one task: runs its process on the host where Ray placed it. `deploy.ray.placement` calls it remotely.

The process has a guard in a session of its own, which Ray does not kill with the actor (`placement.GUARD_LIVES`). The
guard ends the process, with its grace time, whenever the actor has ended: asked to, killed, or because its host or the
launcher was lost.
"""

import os
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import ray.util

from async_rl.errors import ConfigError
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.net.http_client import HttpClient, answers_200, http_url
from deploy.cluster.plan import ANY_HOST
from deploy.cluster.process import Process, Running, start_process
from deploy.cluster.restarts import DONE
from deploy.ray.groups import Node, TaskEnd
from deploy.ray.specs import NUM_PORTS

TOKEN_VARIABLE = "ASYNC_RL_TOKEN"

SHARED_FILE = ".launch-id"
"""In the run's directory, written by the launcher: a host that reads its id there sees the same directory."""

POLL_S = 0.2
PROBE_TIMEOUT_S = 2.0


class TaskActor:
    """`run` and `healthy` last; the other calls return soon, also meanwhile.

    Args:
        token: `ASYNC_RL_TOKEN` of the process. Ray shows arguments of an actor to nobody; None leaves what Ray's own
            processes were started with on this host.
        directory: the launcher's working directory, to which paths in the config are relative.
    """

    def __init__(self, token: str | None, directory: str) -> None:
        self._env = {} if token is None else {TOKEN_VARIABLE: token}
        self._directory = directory
        self._running: Running | None = None
        self._node: Node | None = None

    def meet(self, run_dir: str, launch_id: str) -> Node:
        """Where this task is, with ports that are free at the moment.

        Raises:
            ConfigError: this host does not see the run's directory.
        """
        address = str(ray.util.get_node_ip_address())
        try:
            os.chdir(self._directory)
            found = (Path(run_dir) / SHARED_FILE).read_text()
        except OSError as error:
            raise ConfigError(_not_shared(error.filename, error.strerror)) from error
        if found != launch_id:
            raise ConfigError(_not_shared(run_dir, "it has another directory there"))
        # At every address of the host, since instances and torchrun listen at all of them.
        self._node = Node(socket.gethostname(), address, tuple(free_ports(NUM_PORTS, ANY_HOST)))
        return self._node

    def run(self, process: Process) -> TaskEnd:
        """Runs the process until it has ended.

        Raises:
            ConfigError: its log cannot be written.
        """
        process = replace(process, env={**process.env, **self._env})
        # Removed here: Ray kills the actor, which then removes nothing.
        with tempfile.TemporaryDirectory(prefix="async-rl-reports-") as reports:
            self._running = running = start_process(process, Path(reports) / process.name)
            while (code := running.exit_code()) is None:
                time.sleep(POLL_S)
            if code == DONE:
                return TaskEnd(process.name, code, None, "")
            failure = running.failure()
            return TaskEnd(process.name, code, failure.cause, str(failure))

    def healthy(self) -> bool:
        """Waits until an instance answers as healthy; False if it ends before."""
        assert self._node is not None, "a task meets the others first"
        client = HttpClient(http_url(self._node.address, self._node.ports[0]), PROBE_TIMEOUT_S)
        while self._running is None or self._running.exit_code() is None:
            if answers_200(client, "/health"):
                return True
            time.sleep(POLL_S)
        return False

    def end(self) -> None:
        """SIGTERM to the process, and SIGKILL after its grace time."""
        if self._running is not None:
            self._running.request_end()


def _not_shared(path: str, reason: str | None) -> str:
    return (
        f"the host {socket.gethostname()} does not see {path!r} as the launcher does: {reason}. All hosts of a run "
        "share run.dir and the launcher's working directory: use a file system that all mount under the same path"
    )
