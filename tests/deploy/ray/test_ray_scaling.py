"""Instances come and go on a real Ray cluster as a scripted trainer desires, on nodes that an autoscaler adds."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.net.local_address import address_for_others
from tests.support.local_run import command_of, gone
from tests.support.ray_cluster import OBJECT_STORE_BYTES, environment, needs_ray
from tests.support.stand_ins import CONFIG, Ground

pytestmark = [pytest.mark.distributed, needs_ray, pytest.mark.timeout(400)]

TRAINER = """
import http.server, json, pathlib, sys, threading, time

address = next(word.partition("=")[2] for word in reversed(sys.argv) if word.startswith("--pool.fleet_address="))
host, port = address.split(":")[0], int(address.split(":")[1])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"instances": [], "desired_instances": int(pathlib.Path("desired").read_text())})

    def do_POST(self):
        name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["name"]
        pathlib.Path(f"drained-{name}").touch()
        self.answer({})

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass

server = http.server.HTTPServer((host, port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
pathlib.Path("run/fleet.json").write_text(json.dumps({"url": f"http://{host}:{port}"}))
while not pathlib.Path("stop").exists():
    time.sleep(0.1)
"""

INSTANCE = """
import http.server, pathlib, sys, threading, time

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("0.0.0.0", int(option("--port"))), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
drained = pathlib.Path("drained-" + option("--name"))
while not drained.exists():
    time.sleep(0.1)
drained.unlink()
"""

HEAD_ID = 51 * "f" + "00000"
"""By which Ray's provider of nodes on this host knows the head."""

AUTOSCALER: dict[str, Any] = {
    "cluster_name": "test",
    "max_workers": 3,
    "idle_timeout_minutes": 0.1,
    "provider": {
        "type": "fake_multinode",
        # All nodes have the address of this host.
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 2, "object_store_memory": OBJECT_STORE_BYTES},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        },
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "rsync_exclude": [],
    "rsync_filter": [],
}
"""A head with room for the trainer and one instance; each further instance needs a node of its own."""


@pytest.fixture
def autoscaling(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster whose autoscaler starts nodes on this host."""
    temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    config = tmp_path / "autoscaler.json"
    host, (port,) = address_for_others(), free_ports(1)
    provider = {**AUTOSCALER["provider"], "gcs_address": f"{host}:{port}"}
    config.write_text(json.dumps({**AUTOSCALER, "provider": provider}))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--node-ip-address={host}", f"--port={port}"]
    command += [f"--autoscaling-config={config}", "--num-cpus=4", f"--temp-dir={temp_dir}", "--include-dashboard=false"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    output = tmp_path / "head.txt"
    with output.open("wb") as log:
        head = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(
                RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD_ID
            ),
            start_new_session=True,
        )
    _wait_until_started(output, head)
    yield f"{host}:{port}"
    mine = [p for p in psutil.process_iter() if any(temp_dir in word for word in command_of(p))]
    head.terminate()
    head.wait(30)
    for process in mine:
        if process.is_running():
            process.kill()
    assert gone(mine)
    shutil.rmtree(temp_dir)


def _wait_until_started(output: Path, head: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 90
    while "Ray runtime started" not in output.read_text():
        assert head.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


LAUNCHER = """
import runpy
from deploy.ray import driver
driver.SCALE_UP_AFTER_S = driver.SCALE_DOWN_AFTER_S = 6.0
runpy.run_module("deploy.ray", run_name="__main__")
"""
"""With less time before it follows than a user's has."""


def test_instances_follow_the_desired_number_on_nodes_that_come_and_go(autoscaling: str, ground: Ground) -> None:
    (ground.path / "config.toml").write_text(CONFIG.replace("num_instances = 2", "num_instances = 1"))
    (ground.path / "trainer.py").write_text(TRAINER)
    (ground.path / "inference_service.py").write_text(INSTANCE)
    desired = ground.path / "desired"
    desired.write_text("1")
    scaling = ["--cluster.max_instances=3"]
    # The programs above stand for ours: modules of the working directory are not taken otherwise.
    scaling.append("--cluster.env=" + json.dumps({"PYTHONPATH": str(ground.path)}))
    with (ground.path / "output.txt").open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, "config.toml", *scaling],
            cwd=ground.path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(RAY_ADDRESS=autoscaling, PYTHONPATH=os.environ.get("PYTHONPATH", "")),
        )

    def running() -> list[str]:
        file = ground.path / "run" / "launch.json"
        tasks = json.loads(file.read_text())["tasks"] if file.exists() else []
        return [task["name"] for task in tasks if task["state"] == "running"]

    def wait_for(names: list[str], note: str) -> None:
        begun_s = time.monotonic()
        while running() != names:
            said = (ground.path / "output.txt").read_text()
            assert launcher.poll() is None and time.monotonic() < begun_s + 120, (running(), said)
            time.sleep(0.1)
        print(f"{note}: {time.monotonic() - begun_s:.1f} s")

    try:
        wait_for(["trainer-0", "instance-0"], "one instance")
        desired.write_text("3")
        wait_for(["trainer-0", "instance-0", "instance-1", "instance-2"], "from one to three")
        desired.write_text("1")
        wait_for(["trainer-0", "instance-0"], "from three to one")
        (ground.path / "stop").touch()
        assert launcher.wait(60) == 0, (ground.path / "output.txt").read_text()
    finally:
        launcher.kill()
        launcher.wait()
