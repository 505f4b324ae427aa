"""`async-rl watch` on directories of runs that are over, go on, or were never there."""

import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from async_rl.errors import ConfigError
from async_rl.shared.locks.lease import take_lease
from deploy import watch as watch_command
from deploy.watch import main, watch

MakeRecord = Callable[..., dict[str, Any]]


def write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def watched(run_dir: Path) -> list[str]:
    said = io.StringIO()
    watch(run_dir, Console(file=said, width=200), None)
    return said.getvalue().splitlines()


def wait_for_lines(said: io.StringIO, number: int) -> None:
    while said.getvalue().count("\n") < number:
        time.sleep(0.01)


def test_a_run_that_is_over_is_shown_at_once(tmp_path: Path, record: MakeRecord) -> None:
    write(tmp_path, [record(i) for i in range(3)])
    *lines, advice = watched(tmp_path)
    assert [line.partition(" done")[0] for line in lines] == [
        "iteration 0, 1/3",
        "iteration 2, 3/3",
    ] and "balance" in advice


def test_a_run_that_ended_early_and_one_that_never_began_end_the_view(tmp_path: Path, record: MakeRecord) -> None:
    with pytest.raises(ConfigError, match="has no complete iteration, and no trainer is at work"):
        watched(tmp_path)
    write(tmp_path, [record(0)])
    lease = take_lease(tmp_path, 20.0)
    lease.release()
    assert watched(tmp_path)[0].startswith("iteration 0, 1/3 done")


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path, record: MakeRecord) -> None:
    lease = take_lease(tmp_path, 20.0)
    said = io.StringIO()
    viewer = threading.Thread(target=watch, args=(tmp_path, Console(file=said, width=200), None))
    write(tmp_path, [record(0)])
    viewer.start()
    wait_for_lines(said, 1)
    write(tmp_path, [record(1), record(2)])
    viewer.join(60)
    lease.release()
    assert [line.split()[2] for line in said.getvalue().splitlines()[:-1]] == ["1/3", "3/3"]


def test_a_run_that_was_over_and_goes_on_with_more_iterations_is_followed(tmp_path: Path, record: MakeRecord) -> None:
    write(tmp_path, [record(i) for i in range(3)])
    lease = take_lease(tmp_path, 20.0)
    said = io.StringIO()
    viewer = threading.Thread(target=watch, args=(tmp_path, Console(file=said, width=200), None))
    viewer.start()
    wait_for_lines(said, 2)
    write(tmp_path, [{**record(3), "iterations": 5}])
    time.sleep(0.3)
    write(tmp_path, [{**record(4), "iterations": 5}])
    viewer.join(60)
    lease.release()
    assert [line.split()[2] for line in said.getvalue().splitlines()[:-1]] == ["1/3", "3/3", "5/5"]


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no such' is not a directory"):
        watch(tmp_path / "no such", Console(file=io.StringIO()), None)
    assert main([str(tmp_path / "no such")]) == 2
    assert "async-rl watch: " in capsys.readouterr().err


def test_interrupting_it_is_its_ordinary_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_command, "watch", interrupted)
    assert main([str(tmp_path)]) == 0


def test_a_path_that_cannot_be_looked_at_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: File name too long; name the run\.dir"):
        watched(Path("n" * 300))
