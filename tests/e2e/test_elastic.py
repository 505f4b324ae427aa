"""Instances come and go while a real run goes on: real servers, the real trainer, the fleet's own commands."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.shared.net.free_ports import free_ports
from tests.support.local_run import Run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

DEADLINE_S = 120.0


class Fleet:
    """A run with the commands that change its fleet, and instances that register themselves."""

    def __init__(self, run: Run, model: Path) -> None:
        self.run = run
        self.model = model
        self.instances: list[subprocess.Popen[bytes]] = []

    def url(self) -> str:
        file = self.run.dir / "fleet.json"
        self.wait_for(file.exists)
        return str(json.loads(file.read_text())["url"])

    def listed(self) -> dict[str, str]:
        """Name -> state, as the command prints them."""
        return {each["name"]: each["state"] for each in json.loads(self.command("ls", "--json"))["instances"]}

    def serve(self, name: str) -> subprocess.Popen[bytes]:
        arguments = ["--model", str(self.model), "--port", "0", "--register", self.url(), "--name", name]
        with (self.run.dir / f"{name}.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "inference_service", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.instances.append(process)
        return process

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "async_rl.rollouts.fleet.cli", *arguments, "--run", str(self.run.dir)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in self.run.members()}

    def wait_for(self, condition: Callable[[], Any]) -> None:
        self.run.wait_until(condition, DEADLINE_S)


@pytest.fixture
def fleet(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Fleet]:
    model = tiny_model("qwen3", tied=True)
    run = Run(tmp_path, model)
    fleet = Fleet(run, model)
    yield fleet
    for process in fleet.instances:
        process.kill()
        process.wait()
    run.end()


def test_an_instance_joins_two_leaders_at_once_and_the_first_one_is_drained(fleet: Fleet, tmp_path: Path) -> None:
    run = fleet.run
    run.start(
        *("--train.iterations", "200", "--publish.snapshot_dir", str(tmp_path / "snapshots")),
        *("--trainer.num_processes", "2", "--rollout.max_response_tokens", "48"),
    )
    run.wait_for_iterations(1)
    late = fleet.serve("late")
    fleet.wait_for(lambda: fleet.states().get("late") == "ready")
    (first,) = set(fleet.states()) - {"late"}
    assert "drains" in fleet.command("drain", first)
    fleet.wait_for(lambda: set(fleet.states()) == {"late"})
    assert fleet.listed() == {"late": "ready"}
    num_before = len(run.lines("ledger.jsonl"))
    run.wait_for_iterations(num_before + 3)
    # The last one to leave is asked to by its own SIGTERM, and goes on until another has come.
    fleet.serve("third")
    fleet.wait_for(lambda: fleet.states().get("third") == "ready")
    late.terminate()
    fleet.wait_for(lambda: set(fleet.states()) == {"third"})
    assert late.wait(30) == 0
    num_before = len(run.lines("ledger.jsonl"))
    run.wait_for_iterations(num_before + 2)
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(len(proofs)))
    assert all(proof["on_policy"] and proof["num_groups"] == 6 for proof in proofs)
    assert {record["retries"] for record in run.lines("metrics.jsonl")} == {0}, (
        "whoever is drained finishes what it has"
    )
    assert 1 <= len(list((tmp_path / "snapshots").glob("[!.]*.safetensors"))) <= 2, "the current and the previous one"


@pytest.mark.nightly
def test_what_was_added_and_removed_by_hand_stays_so_when_the_trainer_is_started_again(fleet: Fleet) -> None:
    run, (port,) = fleet.run, free_ports(1)
    run.start("--inference.num_instances=2", "--train.iterations=200", "--checkpoint.every=1")
    run.wait_for_iterations(1)
    first, second = sorted(fleet.states())
    fleet.command("remove", first)
    serve = [sys.executable, "-m", "inference_service", "--model", str(fleet.model), "--port", str(port)]
    fleet.instances.append(subprocess.Popen(serve, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    fleet.command("add", f"http://127.0.0.1:{port}", "--name", "mine")
    expected = {second: "ready", "mine": "ready"}
    fleet.wait_for(lambda: fleet.states() == expected)
    url = fleet.url()
    run.kill_trainer()
    fleet.wait_for(lambda: fleet.url() != url)
    fleet.wait_for(lambda: fleet.states() == expected)
    assert run.restarts()["trainer"] == 1
    # What is taken back by hand is back for good.
    fleet.command("add", f"http://{first}")
    fleet.wait_for(lambda: fleet.states() == {first: "ready", **expected})


@pytest.mark.nightly
def test_a_run_without_a_known_instance_waits_for_one_to_register_and_hands_over_to_another(fleet: Fleet) -> None:
    """With a single leader, and instances that join with the next publish."""
    (port,) = free_ports(1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ["--nproc-per-node", "1", "--standalone", "-m", "async_rl.trainer", str(fleet.run.config)]
    arguments += ["--pool.fleet_address", f"127.0.0.1:{port}", "--pool.timeout_s", "60", "--train.iterations", "20"]
    with fleet.run.output.open("wb") as output:
        fleet.run.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    fleet.wait_for(lambda: "waiting for an instance to register" in fleet.run.output.read_text())
    only = fleet.serve("only")
    fleet.run.wait_for_iterations(1)
    fleet.run.hold()
    second = fleet.serve("second")
    fleet.wait_for(lambda: fleet.states().get("second") == "joining")
    fleet.run.tell("")
    fleet.wait_for(lambda: fleet.states()["second"] == "ready")
    fleet.run.hold()
    assert "drains" in fleet.command("drain", "only")
    fleet.wait_for(lambda: set(fleet.states()) == {"second"})
    # Before the run may end: it is told when it registers the next time.
    assert only.wait(60) == 0, "it was told to leave"
    fleet.run.tell("")
    assert fleet.run.finish() == 0, fleet.run.everything_said()
    proofs = fleet.run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(20))
    assert all(proof["on_policy"] and proof["num_groups"] == 6 for proof in proofs)
    assert {record["retries"] for record in fleet.run.lines("metrics.jsonl")} == {0}
    assert not (fleet.run.dir / "fleet.json").exists()
    assert second.poll() is None, "it waits for the next run"


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.nightly
def test_two_runs_that_are_given_the_same_instance_are_both_proven_and_lose_only_time(
    fleet: Fleet, tmp_path: Path
) -> None:
    """It answers the trainer whose weights it has, and refuses the other one, which goes on without it."""
    (tmp_path / "other").mkdir()
    runs = (fleet.run, Run(tmp_path / "other", fleet.model))
    (port,) = free_ports(1)
    try:
        # It is registered nowhere.
        serve = [sys.executable, "-m", "inference_service", "--model", str(fleet.model), "--port", str(port)]
        fleet.instances.append(subprocess.Popen(serve, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        for run in runs:
            run.start("--train.iterations=25", "--publish.timeout_s=5")
        for run in runs:
            run.wait_for_iterations(1)
            # However long it takes to start, iterations are left.
            run.hold()
            run.wait_until(lambda: listens(port))
            run.tell("")
            Fleet(run, fleet.model).command("add", f"http://127.0.0.1:{port}", "--name", "shared")
        for run in runs:
            assert run.finish() == 0, run.everything_said()
    finally:
        runs[1].end()
    for run in runs:
        proofs = run.lines("ledger.jsonl")
        assert [proof["iteration"] for proof in proofs] == list(range(25))
        assert all(
            proof["on_policy"] and proof["num_groups"] == 6 and proof["max_logprob_gap"] < 1e-3 for proof in proofs
        )
    took_part = [{url for p in run.lines("ledger.jsonl") for url in p["logprob_gaps"]["instances"]} for run in runs]
    assert any(f"http://127.0.0.1:{port}" in urls for urls in took_part)
    assert any("leaves service" in run.everything_said() or "serves one run" in run.everything_said() for run in runs)
