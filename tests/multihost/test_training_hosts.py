"""Training ranks on two hosts whose names are loopback, under torchrun alone; nothing said about interfaces."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import Host, Hosts, environment, why_not
from tests.support.local_run import Run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

FINISH_S = 300
FLEET_PORT = 8600
MASTER = "10.80.2.1"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """As Debian has it, each name is loopback; the network of the rendezvous is not the first one."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    names = ("node-1", "node-2", "instance")
    addresses = {
        name: {"none": "127.0.1.1", "office": f"10.80.1.{number}", "data": f"10.80.2.{number}"}
        for number, name in enumerate(names, start=1)
    }
    hosts = Hosts({"office": "/24", "data": "/24"}, addresses)
    yield hosts
    hosts.close()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a program on a host, with its output in a file."""
    started: list[subprocess.Popen[bytes]] = []

    def start(host: Host, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as log:
            started.append(
                subprocess.Popen(
                    host.command([sys.executable, "-m", *words]),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(ASYNC_RL_TOKEN="between hosts"),
                )
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            for part in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                part.kill()
            process.wait()


def test_two_training_hosts_and_an_instance_end_a_run_proven(
    hosts: Hosts, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen3", tied=True)
    run = Run(tmp_path, model)
    run.dir.mkdir()
    settings = {
        "pool.timeout_s": FINISH_S,
        "pool.fleet_host": "0.0.0.0",
        "pool.fleet_port": FLEET_PORT,
        "cluster.training_nodes": 2,
        "train.iterations": 2,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    serve = ["inference_service", "--model", str(model), "--host", "0.0.0.0", "--port", "8001"]
    start(hosts["instance"], [*serve, "--register", f"http://{MASTER}:{FLEET_PORT}"], tmp_path / "instance.txt")
    nodes = []
    for rank in range(2):
        launcher = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
        launcher += ["--master-addr", MASTER, "--master-port", "29500", "-m", "trainer", str(run.config)]
        nodes.append(start(hosts[f"node-{rank + 1}"], [*launcher, *overrides], tmp_path / f"node-{rank}.txt"))
    codes = [node.wait(FINISH_S) for node in nodes]
    assert codes == [0, 0], "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.txt")))
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [0, 1]
    assert all(proof["on_policy"] and proof["num_responses"] == 24 for proof in proofs), proofs
    assert len({proof["fingerprint"] for proof in proofs}) == 2, "every step changes the weights"
