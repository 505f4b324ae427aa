"""A run on a Ray cluster of several hosts, with tokens, as a job; the host of its trainer is cut off on the way."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.common.hosts import Host, Hosts, environment, why_not
from tests.support.local_run import Run, command_of, gone
from tests.support.ray_cluster import OBJECT_STORE_BYTES, SETTINGS, needs_ray, proven

pytestmark = [pytest.mark.distributed, needs_ray, pytest.mark.timeout(900)]

HEAD = "10.79.1.1"
NODES = ("one", "two", "three", "spare")
"""For two instances and one training node; the spare one takes over from the one that is cut off."""

ITERATIONS = 40
NUM_RESPONSES = 24
FINISH_S = 500.0
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ray-" + "7" * 40, "ASYNC_RL_TOKEN": "between hosts"}
TUNED = {f"RAY_{name}": str(value) for name, value in SETTINGS.items()}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    addresses = {"head": HEAD, **{name: f"10.79.1.{i}" for i, name in enumerate(NODES, 2)}}
    hosts = Hosts({"net": "/24"}, {name: {"net": address} for name, address in addresses.items()})
    yield hosts
    hosts.close()


class Daemons:
    """`ray start` on every host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        head = ["--head", "--port=6379", f"--temp-dir={self.temp_dir}", "--num-cpus=0"]
        self._start(hosts["head"], HEAD, *head)
        for name in NODES:
            self._start(hosts[name], hosts[name].addresses["net"], f"--address={HEAD}:6379", "--num-cpus=2")

    def _start(self, host: Host, address: str, *options: str) -> None:
        """Starts Ray's processes of a host, and waits until they have joined."""
        output = self._folder / f"ray-{host.name}.txt"
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"]
        ray += [f"--object-store-memory={OBJECT_STORE_BYTES}", *options]
        # Ray's files are each host's own: all nodes unpack a job's working directory under the same path.
        own_files = f"mount -t tmpfs none {self.temp_dir} && exec {shlex.join(ray)}"
        with output.open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    host.command(["sh", "-c", own_files]),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(RAY_USAGE_STATS_ENABLED="0", **SECRET, **TUNED),
                )
            )
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in output.read_text():
            assert self._started[-1].poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        mine = [p for p in psutil.process_iter() if any(self.temp_dir in word for word in command_of(p))]
        for process in self._started:
            for part in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                part.kill()
            process.wait()
        assert gone(mine)
        shutil.rmtree(self.temp_dir)


@pytest.fixture
def daemons(hosts: Hosts, tmp_path: Path) -> Iterator[Daemons]:
    daemons = Daemons(hosts, tmp_path)
    yield daemons
    daemons.close()


def test_a_job_goes_on_when_the_host_of_its_trainer_is_cut_off(
    hosts: Hosts, daemons: Daemons, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    work = tmp_path / "work"
    work.mkdir()
    more = "[inference]\nnum_instances = 2\n[checkpoint]\nevery = 1\n[cluster]\nmax_restarts = 10\n"
    (work / "run.toml").write_text(run.config.read_text() + more)
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address=http://127.0.0.1:8265"]
    submit += [f"--working-dir={work}", "--", sys.executable, "-m", "deploy.ray", "run.toml"]
    submit += [f"--reward.name=python:{run.reward}:slow", f"--train.iterations={ITERATIONS}"]

    without = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="wrong-" + "7" * 40)
    refused = subprocess.run(hosts["head"].command(submit), env=without, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and not (run.dir / "launch.json").exists(), refused.stdout + refused.stderr

    with run.output.open("wb") as output:
        job = subprocess.Popen(
            hosts["head"].command(submit), stdout=output, stderr=subprocess.STDOUT, env=environment(**SECRET)
        )

    def task(name: str) -> dict[str, str]:
        tasks = json.loads((run.dir / "launch.json").read_text())["tasks"]
        return next(task for task in tasks if task["name"] == name)

    def wait_for(condition: Callable[[], object]) -> float:
        begun_s = time.monotonic()
        while not condition():
            assert job.poll() is None and time.monotonic() < begun_s + 200, run.everything_said()
            time.sleep(0.1)
        return time.monotonic() - begun_s

    wait_for(lambda: len(run.lines("ledger.jsonl")) >= 3)
    cut = task("trainer-0")["host"]
    hosts[cut].cut("net")
    noticed_s = wait_for(lambda: task("trainer-0")["state"] != "running")
    again_s = wait_for(lambda: task("trainer-0")["state"] == "running" and task("trainer-0")["host"] != cut)
    num_before = len(run.lines("ledger.jsonl"))
    trained_s = wait_for(lambda: len(run.lines("ledger.jsonl")) > num_before)
    hosts[cut].restore("net")
    assert job.wait(FINISH_S) == 0, run.everything_said()
    proven(run, ITERATIONS, NUM_RESPONSES)
    assert task("instance-0")["restarts"] == task("instance-1")["restarts"] == 0, "instances stay"
    print(
        f"link cut: noticed {noticed_s:.1f} s, runs elsewhere {again_s:.1f} s, next iteration {trained_s:.1f} s later"
    )
