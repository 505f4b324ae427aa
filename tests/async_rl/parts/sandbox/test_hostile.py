"""Hostile programs neither harm nor outlive whoever runs them, nor reach a secret: as root and as a plain user, with
each backend."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.hostile_programs import BREAKING, REACHING
from tests.support.other_user import NOBODY, Place, place_for_everybody
from tests.support.sandbox_worker import limits_of

pytestmark = pytest.mark.distributed

START_AND_END_S = 15.0
"""On a machine whose cores others use."""

COMBINATIONS = (
    [
        ("root", "bubblewrap"),
        ("nobody", "sandlock"),
        # Each user and each backend once is enough by day: a worker of all programs takes half a minute.
        pytest.param("root", "sandlock", marks=pytest.mark.nightly),
        pytest.param("nobody", "bubblewrap", marks=pytest.mark.nightly),
    ]
    if os.geteuid() == 0
    else [("this user", "bubblewrap"), ("this user", "sandlock")]
)


@pytest.fixture(scope="module")
def place() -> Iterator[Place | None]:
    if os.geteuid() != 0:
        yield None
        return
    with place_for_everybody() as place:
        yield place


@pytest.fixture(scope="module")
def results(place: Place | None) -> Any:
    """`results(user, backend)`: what a worker reported, which ran all programs once."""

    @cache
    def get(user: str, backend: str) -> dict[str, Any]:
        arguments = ("-m", "tests.support.sandbox_worker", backend)
        command = [sys.executable, *arguments]
        if place is not None:
            command = place.command(0 if user == "root" else NOBODY, *arguments)
        environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        cwd = ROOT if place is None else "/"
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return get


@pytest.mark.always
@pytest.mark.parametrize(("user", "backend"), COMBINATIONS)
@pytest.mark.parametrize("name", REACHING)
def test_a_program_reaches_nothing_of_its_caller(results: Any, user: str, backend: str, name: str) -> None:
    ended = results(user, backend)["ended"][name]
    assert (ended["status"], ended["stdout"]) == ("ok", "[]\n"), ended


@pytest.mark.always
@pytest.mark.parametrize(("user", "backend"), COMBINATIONS)
@pytest.mark.parametrize("name", BREAKING)
def test_a_program_that_breaks_its_limits_is_ended(results: Any, user: str, backend: str, name: str) -> None:
    ended = results(user, backend)["ended"][name]
    _, statuses = BREAKING[name]
    assert ended["status"] in statuses, ended
    assert ended["seconds"] < limits_of(name).wall_s + START_AND_END_S, ended


@pytest.mark.parametrize(("user", "backend"), COMBINATIONS)
def test_output_arrives_as_it_was_written(results: Any, user: str, backend: str) -> None:
    ended = results(user, backend)["ended"]["garbage"]
    assert ended["stdout"].encode("latin-1") == bytes(range(256)) * 1000


@pytest.mark.parametrize(("user", "backend"), COMBINATIONS)
def test_nothing_is_left_of_hostile_programs(results: Any, user: str, backend: str) -> None:
    found = results(user, backend)
    assert found["left"] == []
    assert found["files"] == ["secret", "socket"]


@pytest.mark.parametrize(("user", "backend"), COMBINATIONS)
def test_nothing_is_left_when_a_call_is_cancelled_or_its_caller_is_killed(
    results: Any, user: str, backend: str
) -> None:
    assert results(user, backend)["left_of"] == {"cancelled": [], "killed": []}


@pytest.mark.parametrize(("user", "backend"), COMBINATIONS)
def test_programs_beside_hostile_ones_run_as_if_alone(results: Any, user: str, backend: str) -> None:
    harmless = results(user, backend)["harmless"]
    assert len(harmless) > 3
    assert {(each["status"], each["stdout"]) for each in harmless} == {("ok", "['program.py'] 0\n")}
