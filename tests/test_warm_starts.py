"""A process forked from the warm interpreter cannot be told from one that was started anew; see tests/support/warm."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.config.file import parse_config
from async_rl.shared.programs import process_guard
from async_rl.shared.programs.process_guard import end_with_parent
from deploy.local.machine import Machine
from deploy.local.plan import num_ports, plan
from tests.conftest import WARM
from tests.support import ROOT
from tests.support.local_run import command_of
from tests.support.minimal_config import minimal_tree
from tests.support.warm import facts
from tests.support.warm.client import POSSIBLE, WarmStarts
from tests.support.warm.interpreter import NAME
from tests.support.warm.start import start_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not POSSIBLE, reason="Linux on x86-64 only"),
    pytest.mark.skipif(bool(os.environ.get("ASYNC_RL_TESTS_COLD")), reason="every start is an ordinary one"),
]

FACTS = [sys.executable, "-m", facts.__name__]
OF_ONE = ("pid", "random", "shown", "is warm")


@pytest.fixture
def once() -> Iterator[Callable[[bool], None]]:
    """Turns the warm interpreter on or off until the end of the test."""
    before = WARM.is_on

    def turn(on: bool) -> None:
        WARM.is_on = on

    yield turn
    WARM.is_on = before


OTHERS = {**os.environ, "OTHER": "\udcff=", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "environment": {"env": OTHERS},
    "session": {"start_new_session": True, "preexec_fn": end_with_parent},
    "group": {"process_group": 0},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_fork_sees_what_a_new_interpreter_sees(
    once: Callable[[bool], None], options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tests").symlink_to(Path(__file__).parent)
    options = {"cwd": tmp_path, **options}
    seen: list[dict[str, Any]] = []
    for on in (False, True):
        once(on)
        command = [*FACTS, "", "two words"]
        done = subprocess.run(command, input="typed", capture_output=True, text=True, **options)
        assert done.returncode == 0 and not done.stderr, done.stderr
        # Its first word is the file, as the path of an import was when it was first imported.
        seen.append(json.loads(done.stdout) | {"argv": json.loads(done.stdout)["argv"][1:]})
    cold, warm = seen
    assert warm["parent"] == os.getpid() and cold["input"] == "typed"
    assert warm["shown"] == [*FACTS, "two words"], "as in /proc; empty words are left out"
    for each in seen:
        pipes = each.pop("descriptors")
        assert all(pipe.startswith("pipe:") for pipe in pipes)
        each |= each.pop("environment")
    names = (warm.keys() | cold.keys()) - set(OF_ONE)
    assert {n: (cold.get(n), warm.get(n)) for n in names if cold.get(n) != warm.get(n)} == {}


SCRIPT = """#!{python}
import json, os, sys
sys.path.insert(1, {root!r})
from tests.support.warm.facts import facts
print(json.dumps({{"is warm": "torch" in sys.modules, "main": __name__, "file": __file__, **facts()}}))
"""


def test_a_script_in_place_of_python_sees_what_it_sees_anew(once: Callable[[bool], None], tmp_path: Path) -> None:
    script = tmp_path / "own python"
    script.write_text(SCRIPT.format(python=sys.executable, root=str(ROOT)))
    script.chmod(0o755)
    seen: list[dict[str, Any]] = []
    for on in (False, True):
        once(on)
        command = [str(script), "-m", facts.__name__, "two words"]
        done = subprocess.run(command, input="typed", capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and not done.stderr, done.stderr
        seen.append({name: fact for name, fact in json.loads(done.stdout).items() if name != "descriptors"})
    assert [each.pop("is warm") for each in seen] == [False, True]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("how", ["", "code", "text", "raises", "interrupted", "killed"])
def test_a_fork_ends_as_a_new_interpreter_does(once: Callable[[bool], None], how: str) -> None:
    ends = []
    for on in (False, True):
        once(on)
        done = subprocess.run([*FACTS, how], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        ends.append((done.returncode, done.stderr.splitlines()[-1:]))
    assert ends[0] == ends[1]


def test_forks_are_children_of_whoever_starts_them_at_every_depth(tmp_path: Path) -> None:
    """The guard of a process, which starts others, has an interpreter of its own."""
    script = [sys.executable, "-m", "async_rl.shared.programs.process_guard", "--", *FACTS]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard:
        family = {p.pid: command_of(p) for p in psutil.Process(guard.pid).children()}
        assert [NAME] in family.values(), family
        assert guard.stdout is not None
        seen = json.loads(guard.stdout.readline())
        assert seen["parent"] == guard.pid
        assert guard.wait(60) == 0
    assert not any(psutil.pid_exists(pid) for pid in family if pid != seen["pid"]), "nothing outlives the guard"


def test_what_the_programs_set_for_themselves_makes_no_start_a_cold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test process does that has imported the product."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    run = subprocess.run(FACTS, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert json.loads(run.stdout)["is warm"]


def test_programs_of_a_run_are_forked() -> None:
    """Launcher, guard, torchrun, ranks, producer and instances: what is under a cold start is cold itself."""
    config = parse_config(minimal_tree(), source="test")
    made = plan(Path("c.toml"), config, [], machine=Machine(), ports=range(1, 1 + num_ports(config)))
    words = [process.argv[: process.argv.index("-m") + 2] for process in (*made.instances, made.trainer)]
    for module in ("deploy.local.run", process_guard.__name__, "async_rl.trainer", "async_rl.producer"):
        words.append((sys.executable, "-m", module))
    given = {**os.environ, **made.trainer.env}
    assert [each for each in words if start_of(each, given, None, False, -1, None, os.environ) is None] == []


def test_forks_draw_numbers_of_their_own() -> None:
    runs = [subprocess.run(FACTS, stdin=subprocess.DEVNULL, capture_output=True, check=True) for _ in range(2)]
    first, second = (json.loads(run.stdout) for run in runs)
    assert first["random"] != second["random"]


NOT_FORKED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "no module": ([sys.executable, "-c", "1"], {}),
    "another module": ([sys.executable, "-m", "this"], {}),
    "options": ([sys.executable, "-P", *FACTS[1:]], {}),
    "search path": (FACTS, {"env": {**os.environ, "PYTHONPATH": "/somewhere"}}),
    "read by imports": (FACTS, {"env": {**os.environ, "HF_HOME": "/somewhere"}}),
    "descriptors": (FACTS, {"close_fds": False}),
    "umask": (FACTS, {"umask": 0o77}),
}


@pytest.mark.parametrize(("words", "options"), NOT_FORKED.values(), ids=NOT_FORKED)
def test_what_a_fork_cannot_do_is_started_anew(
    words: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(WARM, "_ask", lambda *request: asked.append(request))
    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, **options)
    assert not asked


def test_programs_of_the_directory_itself_are_those_that_run(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("print('mine')")
    command = [sys.executable, "-m", "trainer"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "mine\n", done.stderr


def test_without_an_interpreter_every_start_is_an_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_fork_exec", subprocess._fork_exec)  # type: ignore[attr-defined]  # put back
    lost = WarmStarts(None, {**os.environ, "HOME": "/"})
    mine, its = socket.socketpair()
    its.close()
    lost._connection = mine
    lost.install()
    environment = {**os.environ, "HOME": "/"}
    for _ in range(2):
        run = subprocess.run(FACTS, stdin=subprocess.DEVNULL, capture_output=True, check=True, env=environment)
        assert not json.loads(run.stdout)["is warm"]


def test_a_directory_that_is_missing_is_the_error_of_python() -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/directory"):
        subprocess.run(FACTS, cwd="/no/such/directory")
