"""Functions and classes by value, loaded as workers load any file of a user."""

import functools
import inspect
import linecache
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NewType

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.programs.by_value import pickled, setting_of
from async_rl.shared.programs.user_file import file_identity, load_from_file

pytest.importorskip("cloudpickle")

CELL = """
def helper(x):
    return x / scale

def reward(prompt, responses, row):
    return [helper(row["value"])]
"""


def of_cell(text: str, name: str = "<cell>", **variables: Any) -> Callable[..., Any]:
    """What a notebook's cell defines: a function of `__main__`, whose text is in no file."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    found = {"__name__": "__main__", "__builtins__": __builtins__, **variables}
    exec(compile(text, name, "exec"), found)
    return found["reward"]  # type: ignore[no-any-return]


def written(path: Path, value: Any) -> str:
    pickled("reward.name", value).write("reward.name", path / "reward.py")
    return setting_of(path / "reward.py")


def test_a_function_of_a_cell_comes_with_what_it_refers_to(tmp_path: Path) -> None:
    name = written(tmp_path, of_cell(CELL, scale=2.0))
    assert load_from_file("reward.name", name)(None, [], {"value": 3.0}) == [1.5]
    assert "def reward(prompt, responses, row):" in (tmp_path / "reward.py").read_text(), "to be read"


def closure(kept: float) -> Callable[..., Any]:
    def reward(prompt: Any, responses: Any, row: Any) -> list[float]:
        return [kept for _ in responses]

    reward.correct_at = 0.5  # type: ignore[attr-defined]
    return reward


class Scorer:
    def __init__(self, kept: float) -> None:
        self.kept = kept

    def __call__(self, prompt: Any, responses: Any, row: Any) -> list[float]:
        return [self.kept for _ in responses]

    def score(self, prompt: Any, responses: Any, row: Any) -> list[float]:
        return self(prompt, responses, row)


@pytest.mark.parametrize(
    "function",
    [
        closure(0.25),
        lambda prompt, responses, row: [0.25],
        Scorer(0.25),
        Scorer(0.25).score,
        functools.partial(lambda kept, prompt, responses, row: [kept], 0.25),
    ],
    ids=["closure", "lambda", "object", "method", "partial"],
)
def test_whatever_can_be_called_is_sent(tmp_path: Path, function: Callable[..., Any]) -> None:
    loaded = load_from_file("reward.name", written(tmp_path, function))
    assert loaded(None, ["a response"], {}) == [0.25]
    assert getattr(loaded, "correct_at", None) == getattr(function, "correct_at", None)
    assert inspect.signature(loaded) == inspect.signature(function)


def identity(path: Path, value: Any) -> str:
    path.mkdir()
    return file_identity("reward.name", written(path, value))


def test_the_identity_is_that_of_the_code_and_not_of_its_place(tmp_path: Path) -> None:
    first = identity(tmp_path / "a", of_cell(CELL, scale=2.0))
    assert identity(tmp_path / "b", of_cell("\n\n\n" + CELL, "<another cell>", scale=2.0)) == first
    assert identity(tmp_path / "c", of_cell(CELL, scale=3.0)) != first, "a variable that it reads"
    assert identity(tmp_path / "d", of_cell(CELL.replace("x / scale", "x * scale"), scale=2.0)) != first, "a helper"


def test_the_identity_covers_the_module_that_workers_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "of_a_user.py"
    file.write_text("def reward(prompt, responses, row):\n    return [1.0]\n")
    import of_a_user  # type: ignore[import-not-found]

    first = identity(tmp_path / "a", of_a_user.reward)
    file.write_text(file.read_text() + "\n# changed\n")
    assert identity(tmp_path / "b", of_a_user.reward) != first


SCORERS = """
import enum, functools, sys, typing
from pathlib import Path
from async_rl.shared.programs.by_value import pickled
Level = enum.Enum("Level", "LOW HIGH")
Kind = typing.TypeVar("Kind")
KNOWN = {"yes", "no", ("maybe", 1), 3, None, frozenset({"a", "b"})}
@functools.lru_cache(maxsize=2)
def parsed(text): return float(text)
class Base(typing.Generic[Kind]):
    words = frozenset({"v", "w", "x", "y"})
class Scorer(Base[int]):
    def __call__(self, prompt, responses, row):
        return [parsed("7") * ("yes" in KNOWN) * (row["value"] in {"u", "v", "w"}) * Level.LOW.value]
print(pickled("reward.name", Scorer()).digest)
pickled("reward.name", Scorer()).write("reward.name", Path("reward.py"))
"""


@pytest.mark.distributed
def test_each_program_has_the_same_identity_of_classes_sets_and_caches(tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2", "3"):
        command = [sys.executable, "-c", SCORERS]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        digests.add(subprocess.run(command, capture_output=True, check=True, cwd=tmp_path, env=environment).stdout)
    assert len(digests) == 1
    assert load_from_file("reward.name", setting_of(tmp_path / "reward.py"))(None, [], {"value": "v"}) == [7.0]


@pytest.mark.distributed
def test_a_script_that_was_moved_has_the_same_identities(tmp_path: Path) -> None:
    digests = set()
    for folder in ("one", "another"):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "script.py"
        script.write_text(SCORERS)
        digests.add(
            subprocess.run([sys.executable, script], capture_output=True, check=True, cwd=tmp_path / folder).stdout
        )
    assert len(digests) == 1


def test_the_identity_of_what_refers_to_itself_through_a_set_is_found() -> None:
    score = Scorer(0.5)
    score.known = {score}  # type: ignore[attr-defined]
    assert pickled("reward.name", of_cell("def reward(prompt, responses, row): return kept", kept=score)).digest


def test_what_another_process_would_look_up_in_its_own_main_is_named() -> None:
    kind = NewType("kind", int)
    kind.__module__ = "__main__"
    with pytest.raises(ConfigError, match=r"variable 'kind' .*: kind is pickled as a name of __main__"):
        pickled("reward.name", of_cell("def reward(prompt, responses, row): return [kind(1)]", kind=kind))


@pytest.mark.parametrize(("variable", "kind"), [("file", "TextIOWrapper"), ("lock", "lock")])
def test_what_cannot_be_sent_is_named(tmp_path: Path, variable: str, kind: str) -> None:
    with (tmp_path / "open").open("w") as file:
        lock = threading.Lock()
        by_closure = {
            "file": lambda prompt, responses, row: [file.name for _ in responses],
            "lock": lambda prompt, responses, row: [lock.locked() for _ in responses],
        }[variable]
        by_global = of_cell(
            f"def reward(prompt, responses, row):\n    return [{variable}]", **{variable: locals()[variable]}
        )
        for function in (by_closure, by_global):
            with pytest.raises(ConfigError, match=rf"reward.name: its variable '{variable}' \({kind}\) cannot be sent"):
                pickled("reward.name", function)


FAILING = """
import sys
from async_rl.shared.programs.user_file import load_from_file, traceback_of_user
try:
    load_from_file("reward.name", sys.argv[1])(None, [], {"value": 1})
except ZeroDivisionError as error:
    print(traceback_of_user(error))
"""


@pytest.mark.distributed
def test_a_process_that_knows_nothing_of_it_shows_the_lines_of_the_cell(tmp_path: Path) -> None:
    name = written(tmp_path, of_cell(CELL, scale=0.0))
    failed = subprocess.run([sys.executable, "-c", FAILING, name], capture_output=True, text=True, cwd=tmp_path)
    assert 'File "<cell>", line 3, in helper\n    return x / scale' in failed.stdout, failed.stderr


def test_a_module_beside_the_script_is_found_by_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "beside"
    folder.mkdir()
    (folder / "beside_the_script.py").write_text("def reward(prompt, responses, row):\n    return [7.0]\n")
    monkeypatch.syspath_prepend(folder)
    import beside_the_script  # type: ignore[import-not-found]

    name = written(tmp_path, beside_the_script.reward)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(folder)])
    del sys.modules["beside_the_script"]
    assert load_from_file("reward.name", name)(None, [], {}) == [7.0]
