"""Connects to the Ray cluster and runs a plan on it until it ends; for `deploy.ray.__main__`."""

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from async_rl.errors import ConfigError
from async_rl.shared.files import named_write_errors, write_file
from deploy.cluster.fleet import drain, read_fleet, require_no_trainer
from deploy.cluster.plan import ClusterPlan
from deploy.cluster.process import log_path
from deploy.cluster.run_view import RunFeed, RunView
from deploy.cluster.stopping import stop_on_signals
from deploy.cluster.tasks import Task, remove_tasks, write_launch
from deploy.ray.placement import RayCluster
from deploy.ray.scaling import Scaler
from deploy.ray.specs import run_dir
from deploy.ray.supervisor import Supervisor
from deploy.ray.task_actor import SHARED_FILE

POLL_S = 0.2
SCALE_UP_AFTER_S, SCALE_DOWN_AFTER_S = 30.0, 300.0
"""So long more, or fewer, instances must be desired before any is started, or drained: a start loads a model, so what
is there is kept longer than an iteration."""
CONNECT_TIMEOUT_S = 10.0


def run_on_ray(plan: ClusterPlan, token: str | None, view: RunView) -> None:
    """Runs a plan until its trainer has trained to the end; all tasks have ended on return.

    Raises:
        ConfigError: no cluster is found.
        RunDirInUse: the run goes on already.
        WriteFailed: the run's directory cannot be written.
        NotPlaced, ProcessFailed, RestartsExhausted: see `Supervisor.step`.
    """
    directory, launch_id = run_dir(plan), uuid.uuid4().hex
    require_no_trainer(directory, token)
    with named_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / SHARED_FILE, launch_id)
    feed = RunFeed(directory)
    record = _Record(directory)
    with _connected():
        cluster = RayCluster(str(directory), str(Path.cwd()), launch_id, token)
        scaler = Scaler(plan.min_instances, plan.max_instances, SCALE_UP_AFTER_S, SCALE_DOWN_AFTER_S)
        supervisor = Supervisor(plan, cluster, _Fleet(directory, token), scaler, view.note)
        try:
            while not supervisor.step(time.monotonic()):
                feed.show_new(view)
                record.write(supervisor)
                time.sleep(POLL_S)
        finally:
            while not supervisor.end(time.monotonic()):
                time.sleep(POLL_S)
            record.write(supervisor)
        feed.show_new(view)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """See `deploy.ray.supervisor.Fleet`."""

    run_dir: Path
    token: str | None

    def desired_instances(self) -> int | None:
        fleet = read_fleet(self.run_dir, self.token)
        return None if fleet is None else fleet.desired_instances

    def drain(self, name: str) -> bool:
        return drain(self.run_dir, name, self.token)


class _Record:
    """`launch.json`, written when something has changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: tuple[Task, ...] = ()
        remove_tasks(directory)

    def write(self, supervisor: Supervisor) -> None:
        tasks = tuple(
            Task(
                name=name,
                role="trainer" if slot is supervisor.training else "instance",
                host=slot.group.nodes[i].host if slot.group is not None and slot.group.nodes else None,
                state=slot.state,
                restarts=slot.restarts.total,
                log=str(log_path(self._directory, name)),
                cause=slot.cause,
            )
            for slot in supervisor.slots.values()
            for i, name in enumerate(slot.spec.names)
        )
        if tasks != self._written:
            self._written = tasks
            write_launch(self._directory, "ray", tasks)


@contextmanager
def _connected() -> Iterator[None]:
    address = os.environ.get("RAY_ADDRESS")
    where = f"at RAY_ADDRESS = {address!r}" if address else "of this host (RAY_ADDRESS is not set)"
    try:
        _require_answer(address)
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"cannot connect to the Ray cluster {where}: {error}. Start one with `ray start --head`, or set "
            "RAY_ADDRESS to HOST:PORT of its head; the launcher needs its releases of Ray and Python, and its token"
        ) from error
    # Ray has put its own handler of SIGTERM in their place, which would end this process without its tasks.
    stop_on_signals()
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str | None) -> None:
    """Ray itself tries for minutes to reach a host that does not answer.

    Raises:
        OSError: nothing listens at HOST:PORT; other forms of an address are left to Ray.
    """
    if address is not None and re.fullmatch(r"[^/]+:\d+", address):
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
