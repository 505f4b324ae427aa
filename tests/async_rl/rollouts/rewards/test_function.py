"""From a reward's name to its function, and what the function says of itself; loaded in this process."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.function import RewardTraits, find_file, load_function
from async_rl.shared.programs.user_file import is_async


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Files of rewards are loaded as modules, with their folders on the path."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("async_rl_reward_") or name == "neighbour_of_a_reward":
            del sys.modules[name]


def write(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(text, encoding="utf-8")
    return f"python:{folder / 'own.py'}"


def test_a_users_function_may_use_its_neighbours_and_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_a_reward.py").write_text("BONUS = 3.0")
    text = """
from dataclasses import dataclass
from neighbour_of_a_reward import BONUS
@dataclass
class Score:
    value: "float"
def score(prompt, responses, row):
    return [Score(BONUS).value for _ in responses]
"""
    function = load_function(RewardSection(name=write(tmp_path, text) + ":score"))
    assert function(None, [1, 2], {}) == [3.0, 3.0]


@pytest.mark.parametrize("name", ["score", "SCORE"])
def test_whatever_may_be_called_is_a_reward(tmp_path: Path, name: str) -> None:
    text = "class Scorer:\n    def __call__(self, *_): return [1.0]\nSCORE = Scorer()\nscore = lambda *_: [1.0]"
    assert load_function(RewardSection(name=write(tmp_path, text) + f":{name}"))(None, [1], {}) == [1.0]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none.py:score", "no such file '.*none.py'; write python:path/to/file.py:function"),
        ("own.py", "no such file"),
        (":score", "no such file"),
        ("own.py:missing", r"has no function 'missing'; it has \['score'\]"),
        ("own.py:NUMBER", r"has no function 'NUMBER'; it has \['score'\]"),
        ("own.py:", r"has no function ''"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, place: str, words: str) -> None:
    write(tmp_path, "NUMBER = 3\ndef score(*_): ...")
    with pytest.raises(ConfigError, match=words):
        load_function(RewardSection(name=f"python:{tmp_path}/{place}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def score(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("\x00", "SyntaxError|ValueError"),
    ],
)
def test_a_file_that_fails_when_it_is_loaded_is_shown_with_its_own_traceback(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)loading .*own.py failed:.*({words})") as caught:
        load_function(RewardSection(name=write(tmp_path, text) + ":score"))
    assert "importlib" not in str(caught.value).partition("failed:")[2] or "SyntaxError" in str(caught.value)


@pytest.mark.parametrize("name", ["python:C:/x.py:score", "python::", "python:"])
def test_a_path_is_everything_up_to_the_last_colon(name: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        find_file(name)


async def later(*_: Any) -> list[float]:
    return [1.0]


class Later:
    async def __call__(self, *_: Any) -> list[float]:
        return [1.0]


class Now:
    def __call__(self, *_: Any) -> list[float]:
        return [1.0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [(later, True), (Later(), True), (partial(later, 1), True), (Now(), False), (len, False), (lambda: later(), False)],
    ids=range(6),
)
def test_asynchronous_is_whatever_gives_a_coroutine_by_its_definition(function: Any, expected: bool) -> None:
    assert is_async(function) is expected and RewardTraits.of(function) == RewardTraits(expected, None)


@pytest.mark.parametrize(("threshold", "expected"), [(None, None), (1, 1.0), (0.5, 0.5), (-3, -3.0), (True, 1.0)])
def test_a_threshold_is_a_number_or_left_out(threshold: Any, expected: float | None) -> None:
    function: Any = Now()
    function.correct_at = threshold
    assert RewardTraits.of(function) == RewardTraits(False, expected)


@pytest.mark.parametrize("threshold", ["1.0", float("nan"), float("inf"), -float("inf"), [1.0], 1j, 10**400])
def test_a_threshold_that_is_no_number_is_refused(threshold: Any) -> None:
    function: Any = Now()
    function.correct_at = threshold
    with pytest.raises(ConfigError, match=r"its correct_at is .*: expected a number, the least reward that is correct"):
        RewardTraits.of(function)
