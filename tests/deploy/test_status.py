"""`async-rl status` on directories as launchers and trainers leave them; live ones are in the tests of launchers."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.shared.locks.lease import TTL_S, take_lease
from deploy.cluster.fleet import drain
from deploy.cluster.tasks import Task, write_launch
from deploy.status import Status, read_status, show

pytestmark = pytest.mark.distributed


def status(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.status", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "mine"
    tasks = [
        Task("trainer", "trainer", host="node-1", id="4711", state="running", restarts=2, log="logs/trainer.log"),
        Task("instance-0", "instance", state="failed", cause="RewardError: \x1b[2Jno such column\nmore of it"),
    ]
    write_launch(path, "local", tasks)
    proofs = [{"iteration": i, "on_policy": True, "logprob_gaps": {"instances": {}}} for i in range(3)]
    (path / "ledger.jsonl").write_text("".join(json.dumps(proof) + "\n" for proof in proofs))
    (path / "metrics.jsonl").write_text('{"iteration": 2, "iterations": 10}\n')
    return path


def test_tasks_progress_and_lease_are_shown(run_dir: Path) -> None:
    lease = take_lease(run_dir, TTL_S)
    shown = status("--run", str(run_dir)).stdout
    lease.release()
    after = status("--run", str(run_dir)).stdout
    assert f"{run_dir} (local): 3 of 10 iterations, the last one" in shown
    assert "lease: term 1, held by" in shown
    assert all(word in shown for word in ("node-1", "4711", "running", "logs/trainer.log", "failed"))
    assert "instance-0 was lost: RewardError:  [2Jno such column" in shown and "\x1b" not in shown
    assert "no trainer answers" in shown
    assert "the trainer has ended before the last iteration" in after
    (run_dir / "metrics.jsonl").write_text('{"iteration": 2, "iterations": 3}\n')
    assert "the run is complete" in status("--run", str(run_dir)).stdout


def test_json_has_the_same(run_dir: Path) -> None:
    told = json.loads(status("--run", str(run_dir), "--json").stdout)
    assert (told["engine"], told["num_trained"], told["num_iterations"]) == ("local", 3, 10)
    assert told["tasks"][0]["restarts"] == 2 and told["lease"] is None and told["fleet"] is None


@pytest.mark.parametrize("text", ["", "[]", "null", "5", "{}", '{"url": 5}', '{"url": "http://[::1"}', '{"url": "h"}'])
def test_an_address_that_is_none_is_that_of_no_trainer(run_dir: Path, text: str) -> None:
    (run_dir / "fleet.json").write_text(text)
    assert read_status(run_dir, None).fleet is None
    assert not drain(run_dir, "instance-0", None)


def test_by_default_it_is_the_run_that_was_launched_last(run_dir: Path, tmp_path: Path) -> None:
    assert "mine (local)" in status(cwd=tmp_path).stdout


def test_a_directory_without_a_launch_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for words in ((), ("--run", str(tmp_path))):
        done = status(*words, cwd=tmp_path)
        assert done.returncode == 2 and "--run" in done.stderr and "Traceback" not in done.stderr


def test_the_name_of_a_run_is_shown_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=200)
    show(Status("runs/[lr=1e-6][/b]", "local", 0, None, None, (), None, None), console)
    assert "runs/[lr=1e-6][/b] (local)" in console.file.getvalue()  # type: ignore[attr-defined]
