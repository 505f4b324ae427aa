"""A training pod's exit code after real torchrun, whose own code is always 1; what it records; and its restarts."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.kubernetes.training_pod import MAY_PASS
from deploy.status import read_status
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

Process = subprocess.Popen[str]
Start = Callable[..., Process]

RAISES = """
import os
from async_rl import errors
from async_rl.shared.programs.failure_report import report_failure
report_failure(errors.{error}("why"), os.environ)
raise SystemExit(1)
"""

SAVES_ON_SIGTERM = """
import pathlib, signal, sys
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
signal.pause()
"""


class Instance:
    """What a training pod sees of an instance: whether it is healthy."""

    def __init__(self) -> None:
        self.is_healthy = True
        self.num_asked = 0
        instance = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                instance.num_asked += 1
                self.send_response(200 if instance.is_healthy else 503)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://localhost:{self.server.server_port}"


@pytest.fixture
def instance() -> Iterator[Instance]:
    instance = Instance()
    yield instance
    instance.server.shutdown()
    instance.server.server_close()


@pytest.fixture
def start(tmp_path: Path, instance: Instance) -> Callable[..., Process]:
    """`start(script, attempt=, index=, max_restarts=)`: one pod of two; its working directory is the volume."""

    def process(script: str, *, attempt: int = 0, index: int = 0, max_restarts: int = 3) -> Process:
        program = tmp_path / f"rank-{index}.py"
        program.write_text(script)
        torchrun = [
            sys.executable,
            "-m",
            "async_rl.torchrun",
            "--standalone",
            "--nproc-per-node",
            "1",
            "--stopped-after-s",
            "1",
            str(program),
        ]
        options: dict[str, object] = {
            "--run-dir": "run",
            "--pods": 2,
            "--index": index,
            "--instances": instance.url,
            "--max-restarts": max_restarts,
        }
        words = [str(word) for option in options.items() for word in option]
        pod = {"POD_NAME": f"run-trainer-0-{index}-{attempt}", "NODE_NAME": "node-7", "RESTART_ATTEMPT": str(attempt)}
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.kubernetes.training_pod", *words, "--", *torchrun],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", **pod},
            stderr=subprocess.PIPE,
            text=True,
        )

    return process


def end(process: Process) -> tuple[int, str]:
    said = process.communicate(timeout=120)[1]
    return process.returncode, said


def wait_for_file(file: Path, process: Process) -> None:
    wait_for(lambda: file.exists() or process.poll() is not None)
    assert file.exists()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("raise SystemExit(1)", MAY_PASS),
        ("import os; os.kill(os.getpid(), 9)", MAY_PASS),
        (RAISES.format(error="PublishError"), MAY_PASS),
        (RAISES.format(error="ConfigError"), 2),
        (RAISES.format(error="OnPolicyViolation"), 4),
        (RAISES.format(error="Fenced"), 5),
        (RAISES.format(error="RunStopped"), 143),
    ],
    ids=["trained", "unnamed", "killed", "may pass", "bad input", "lasting", "fenced", "stopped"],
)
def test_the_code_tells_what_ended_the_ranks(start: Start, tmp_path: Path, script: str, code: int) -> None:
    returned, said = end(start(script))
    assert returned == code, said


def test_sigterm_reaches_the_ranks_which_save_first(start: Start, tmp_path: Path) -> None:
    process = start(SAVES_ON_SIGTERM)
    wait_for_file(tmp_path / "ready", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 143
    assert (tmp_path / "saved").exists()


def test_status_shows_the_pods_and_why_they_were_lost(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert end(start(RAISES.format(error="PublishError")))[0] == MAY_PASS
    first, second = read_status(run_dir, None).tasks
    assert (first.name, first.host, first.id, first.state) == ("trainer-0", "node-7", "run-trainer-0-0-0", "waiting")
    assert (first.restarts, first.cause, first.log) == (0, "PublishError: why", "kubectl logs run-trainer-0-0-0")
    assert (second.name, second.state, second.id) == ("trainer-1", "submitted", None)

    assert end(start("", attempt=1))[0] == 0
    assert end(start("", attempt=1, index=1))[0] == 0
    first, second = read_status(run_dir, None).tasks
    assert (first.state, first.restarts, first.cause) == ("done", 1, "PublishError: why")
    assert (second.state, second.restarts, second.id) == ("done", 1, "run-trainer-0-1-1")


def test_a_sole_rank_that_is_stopped_is_killed_and_named(start: Start, tmp_path: Path) -> None:
    code, said = end(start("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"))
    assert code == MAY_PASS and "torchrun: RankLost: process " in said, said
    [task, _] = read_status(tmp_path / "run", None).tasks
    assert task.state == "waiting" and task.cause is not None and task.cause.startswith("RankLost: process ")
    assert "rank-0.py) was stopped by a signal for more than 1 s, and is killed" in task.cause


def test_pods_that_are_lost_again_and_again_without_progress_are_given_up(start: Start, tmp_path: Path) -> None:
    ledger, fails = tmp_path / "run" / "ledger.jsonl", RAISES.format(error="PublishError")

    def attempt(number: int) -> tuple[int, str]:
        return end(start(fails, attempt=number, max_restarts=1))

    assert [attempt(0)[0], attempt(1)[0]] == [MAY_PASS, MAY_PASS]
    ledger.write_text(json.dumps({"iteration": 0, "on_policy": True}) + "\n")
    # Progress: the limit counts anew.
    assert attempt(2)[0] == MAY_PASS
    code, said = attempt(3)
    assert code == 4 and "RestartsExhausted: the training pods were lost after 1 restarts without" in said
    assert "(cluster.max_restarts = 1); the last time: trainer-0: PublishError: why" in said
    [task, _] = read_status(tmp_path / "run", None).tasks
    assert task.state == "failed" and task.cause is not None and "were lost after 1 restarts" in task.cause


def test_a_volume_that_cannot_be_written_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    code, said = end(start(""))
    assert code == 4 and "WriteFailed: cannot write 'run'" in said


def test_the_cause_is_that_of_the_pod_that_failed_not_of_those_that_were_stopped_then(
    start: Start, tmp_path: Path
) -> None:
    assert end(start(RAISES.format(error="PublishError"), index=1))[0] == MAY_PASS
    first = start(SAVES_ON_SIGTERM)
    wait_for_file(tmp_path / "ready", first)
    first.terminate()
    assert end(first)[0] == 143
    code, said = end(start("", attempt=1, max_restarts=0))
    assert code == 4 and "the last time: trainer-1: PublishError: why" in said


def test_a_pod_that_cannot_count_its_attempts_ends_the_run(start: Start, tmp_path: Path) -> None:
    """JobSet would start it again for ever."""
    (tmp_path / "run" / "kubernetes").mkdir(parents=True)
    (tmp_path / "run" / "kubernetes" / "restarts.json").write_text("{")
    code, said = end(start("", attempt=1))
    assert code == 1 != MAY_PASS and "JSONDecodeError" in said


def test_training_starts_when_an_instance_is_healthy(start: Start, tmp_path: Path, instance: Instance) -> None:
    instance.is_healthy = False
    pods = [start("open('trained', 'w')"), start("", index=1)]
    wait_for(lambda: instance.num_asked >= 4)
    assert not (tmp_path / "trained").exists() and [each.poll() for each in pods] == [None, None]
    pods[1].terminate()
    instance.is_healthy = True
    assert [end(each)[0] for each in pods] == [0, 143]
    assert (tmp_path / "trained").exists()
