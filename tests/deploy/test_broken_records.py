"""Run directories whose files are missing, broken, or of a run that has ended: `async-rl status`, in this process."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_rl.records.run_records import RecordFile
from async_rl.shared.locks.lease import LEASE_DIR, Term, take_lease
from async_rl.shared.locks.process_identity import ProcessIdentity, this_process
from deploy.cluster.restarts import num_trained
from deploy.cluster.tasks import LAUNCH_FILE, Task, write_launch
from deploy.status import main

NULLS = b"\0" * 4096
BROKEN = (
    b"",
    b"garbage",
    b"[]",
    b"{}",
    b"5",
    b"null",
    b"\xff\xfe",
    NULLS,
    b'{"url": 5}',
    b'{"iteration": "x"}',
    b"[" * 10**5,
)
"""Zeros are what a file system leaves of a line after a crash of the host."""

NEVER_OWN = ProcessIdentity("another host", 1, "1")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    tasks = [Task("trainer", "trainer", state="done"), Task("instance-0", "instance", state="running")]
    write_launch(path, "local", tasks, this_process())
    proofs = [{"iteration": i, "on_policy": True, "logprob_gaps": {"instances": {}}} for i in range(3)]
    (path / "ledger.jsonl").write_text("".join(json.dumps(proof) + "\n" for proof in proofs))
    (path / "metrics.jsonl").write_text('{"iteration": 2, "iterations": 10}\n')
    (path / "tasks").mkdir()
    take_lease(path, 20.0)
    return path


def records(file: RecordFile) -> list[dict[str, Any]]:
    return list(file.new_records())


def shown(run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["--run", str(run_dir), *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize(
    "name", ["ledger.jsonl", "metrics.jsonl", "fleet.json", ".lease/00000099", "tasks/trainer.json", LAUNCH_FILE]
)
def test_a_broken_file_hides_nothing_of_the_others(
    run_dir: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    with (run_dir / name).open("ab" if name.endswith(".jsonl") else "wb") as file:
        file.write(content + b"\n")
    code, text = shown(run_dir, capsys)
    if name in (LAUNCH_FILE, "tasks/trainer.json"):
        assert code == 2 and f"{name}' is not the record of a launcher" in text
    else:
        assert code == 0 and "3 of 10 iterations" in text and "instance-0" in text


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "fleet.json", ".lease", "tasks", LAUNCH_FILE])
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_file_where_a_folder_belongs_or_the_reverse_is_no_raw_error(
    run_dir: Path, capsys: pytest.CaptureFixture[str], name: str, is_folder: bool
) -> None:
    path = run_dir / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if is_folder:
        path.mkdir()
    else:
        path.write_text("")
    code, text = shown(run_dir, capsys)
    assert code == (2 if name == LAUNCH_FILE or (name == "tasks" and not is_folder) else 0), text


def test_tasks_of_a_launcher_that_has_died_have_ended(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it wrote last: it may have been killed."""
    tasks = [Task("trainer", "trainer", state="failed"), Task("instance-0", "instance", state="running")]
    me = this_process()
    for launcher, state in (
        (me, "running"),
        (ProcessIdentity(me.kernel, me.pid, "1"), "ended"),
        (NEVER_OWN, "running"),
    ):
        write_launch(run_dir, "local", tasks, launcher)
        told = json.loads(shown(run_dir, capsys, "--json")[1])
        assert [task["state"] for task in told["tasks"]] == ["failed", state]


def test_the_lease_of_a_dead_trainer_is_not_called_held(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    me = this_process()
    for process, word in ((me, "held by"), (ProcessIdentity(me.kernel, me.pid, "1"), "held until its death by")):
        term = Term("uid", 2, "node-1", process, 20.0)
        (run_dir / LEASE_DIR / "00000002").write_text(json.dumps(asdict(term)))
        assert f"lease: term 2, {word} node-1" in shown(run_dir, capsys)[1]


@pytest.mark.parametrize("content", BROKEN)
def test_a_launcher_goes_on_beside_broken_records(run_dir: Path, content: bytes) -> None:
    tail = RecordFile(run_dir / "metrics.jsonl")
    for name in ("ledger.jsonl", "metrics.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(content + b'\n{"iteration": 3, "on_policy": false}\n')
    assert num_trained(run_dir) == 3
    assert records(tail)[-1:] == [{"iteration": 3, "on_policy": False}] and records(tail) == []


def test_a_launcher_goes_on_while_a_file_system_is_away(run_dir: Path) -> None:
    """A directory in place of the file stands for any error of reading."""
    metrics, ledger = run_dir / "metrics.jsonl", run_dir / "ledger.jsonl"
    tail = RecordFile(metrics)
    assert len(records(tail)) == 1
    kept = metrics.rename(run_dir / "kept")
    ledger.unlink()
    for path in (metrics, ledger):
        path.mkdir()
    assert records(tail) == [] and num_trained(run_dir) == 0
    metrics.rmdir()
    kept.rename(metrics)
    with metrics.open("a") as file:
        file.write('{"iteration": 3}\n')
    assert records(tail) == [{"iteration": 3}]
