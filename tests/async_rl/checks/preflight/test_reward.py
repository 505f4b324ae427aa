"""Whether a reward is there, told from its text: what surely fails is named, the rest is left to its worker."""

import socket
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.reward import require_reward, require_time_for_tests
from async_rl.checks.preflight.reward_rows import require_answers, require_columns, require_parts_of_rows
from async_rl.config.reward_section import RewardSection
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support.minimal_config import config_of, minimal_tree
from tests.support.parts import needs_part


def require(folder: Path, text: str, function: str = "score") -> None:
    (folder / "neighbour.py").touch()
    (folder / "package").mkdir(exist_ok=True)
    (folder / "reward.py").write_text(text, encoding="utf-8")
    require_reward(RewardSection(name=f"python:{folder / 'reward.py'}:{function}"))


@pytest.mark.parametrize(
    "text",
    [
        "def score(*_): ...",
        "async def score(*_): ...",
        "score = print",
        "score: object = print",
        "a, (score, b) = 1, (2, 3)",
        "import json as score",
        "from json import dumps as score",
        "from neighbour import score",
        "from neighbour import *",
        "import package\ndef score(*_): ...",
        "if True:\n    import json as score",
        "if (score := print): ...",
        "with open('x') as score: ...",
        "for score in (print,): ...",
        "class score: ...",
        "class Score:\n    def __call__(self): ...\nscore = Score()",
        "for name in ('score',):\n    globals()[name] = print",
        "exec('score = print')",
        "def __getattr__(name): return print",
        "try:\n    import no_such_package\nexcept ImportError:\n    pass\nasync def score(*_): ...",
        "def score(*_):\n    import no_such_package",
        "if False:\n    import no_such_package\ndef score(*_): ...",
        "from . import x\ndef score(*_): ...",
        "# -*- coding: latin-1 -*-\ndef score(*_): ...",
    ],
)
def test_a_reward_that_may_be_there_is_left_to_its_worker(tmp_path: Path, text: str) -> None:
    require(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"has no function 'score'; it has \[\]"),
        ("def scores(): ...\ndef _x(): ...", r"has no function 'score'; it has \['scores', '_x'\]"),
        ("class A:\n    def score(self): ...", r"has no function 'score'; it has \[\]"),
        ("def f():\n    score = 1", r"has no function 'score'; it has \['f'\]"),
        ("print(score)", "has no function 'score'"),
        ("\ndef score(:", r"reward\.py, line 2: .*; correct the file"),
        ("import json\nimport no_such_package.x\ndef score(*_): ...", "line 2: there is no module 'no_such_package'"),
        ("from no_such_package import y\ndef score(*_): ...", "line 1: there is no module 'no_such_package'"),
        ("\x00", r"reward\.py"),
    ],
)
def test_what_surely_fails_is_named_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require(tmp_path, text)


@pytest.mark.parametrize("name", ["bleu", "", "Math", "python:", "python:none.py:score", "python:none.py"])
def test_a_name_of_no_reward_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.name is .*python:path/to/file\.py:function"):
        require_reward(RewardSection(name=name))


def test_tests_of_code_need_time_for_one_in_each_response() -> None:
    config = {**minimal_tree(), "reward": {"name": "code"}, "rollout": {"responses_per_prompt": 8}}
    require_time_for_tests(Config.model_validate(config))
    config["rollout"] = {"responses_per_prompt": 16}
    with pytest.raises(ConfigError, match=r"timeout_s = 30 is too short .* 16 responses: set it to at least 53\.33"):
        require_time_for_tests(Config.model_validate(config))
    require_time_for_tests(Config.model_validate({**config, "reward": {"name": "math"}}))


@needs_part("sandbox")
def test_tests_of_code_need_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    require_reward(RewardSection(name="code"))
    monkeypatch.setattr("async_rl.parts.sandbox.probe.find_bubblewraps", list)
    monkeypatch.setattr("async_rl.parts.sandbox.probe.has_sandlock", lambda: False)
    with pytest.raises(ConfigError, match="untrusted programs need a sandbox: install bubblewrap"):
        require_reward(RewardSection(name="code"))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": "bleu"}, r"reward\.name is 'bleu': expected math, multiple_choice, .* or python:"),
        ({"name": "python:none.py:score"}, r"there is no file 'none\.py'"),
        (
            {"name": "http", "options": {"url": "http://127.0.0.1:1", "token_from": "file:/none"}},
            "which cannot be read",
        ),
        (
            {"name": "judge", "options": {"url": "http://127.0.0.1:1", "model": "m", "rubric": "none.txt"}},
            "'none.txt': it is no text",
        ),
    ],
)
def test_each_part_is_checked_and_named(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as alone:
        require_reward(RewardSection.model_validate(part))
    good = {"name": "exact"}
    with pytest.raises(ConfigError) as found:
        require_reward(RewardSection.model_validate({"parts": [good, part | {"label": "x"}, {"name": "nist"}]}))
    lines = str(found.value).splitlines()
    assert lines[0] == f"[[reward.parts]] 'x': {alone.value}"
    assert lines[1].startswith("[[reward.parts]] 'nist': reward.name is 'nist'")


def test_a_service_that_cannot_be_reached_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/rm"
        require_reward(RewardSection(name="http", options={"url": url}))
    assert not caplog.text
    for bad in (url, "https://no-such-host.invalid"):
        require_reward(RewardSection(name="http", options={"url": bad}))
        assert f"reward.options.url is '{bad}', which cannot be reached from here" in caplog.text


def test_tests_of_code_as_a_part_need_time_too() -> None:
    config = {**minimal_tree(), "reward": {"parts": [{"name": "math"}, {"name": "code", "timeout_s": 9}]}}
    with pytest.raises(ConfigError, match=r"timeout_s = 9 is too short"):
        require_time_for_tests(Config.model_validate(config))


def test_rows_that_name_no_part_of_the_reward_are_found_before_the_start(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a", "kind": "exact"}\n{"prompt": "b", "kind": ["exact", "f1"]}\n')
    bad.write_text(good.read_text() + '{"prompt": "c", "kind": "bleu"}\n')
    reward = {"column": "kind", "parts": [{"name": "exact"}, {"name": "f1"}]}

    def require(prompts: Path, held_out: Path, trains: bool = True) -> None:
        tree = {**minimal_tree(), "reward": reward}
        tree["prompts"]["source"] = str(prompts)
        tree["evaluation"] = {"sets": [{"name": "held-out", "source": str(held_out)}]}
        require_parts_of_rows(Config.model_validate(tree), trains=trains)

    require(good, good)
    require(tmp_path / "none.jsonl", good)
    require(bad, good, trains=False)
    for prompts, held_out in ((bad, good), (good, bad)):
        with pytest.raises(
            ConfigError, match=r"bad\.jsonl', row 2 \(from 0\): its row's 'kind' .*'bleu': expected exact, f1"
        ):
            require(prompts, held_out)


@pytest.mark.parametrize("name", ["math", "reasoning_gym"])
def test_a_built_in_reward_needs_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rl.checks.preflight.reward.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"reward\.name '{name}' needs .*install"):
        require_reward(RewardSection(name=name))


@pytest.mark.parametrize("name", ["math", "exact", "f1"])
@pytest.mark.parametrize(("max_prompts", "is_seen"), [(None, True), (2, True), (1, False)])
def test_rows_without_the_answer_that_the_reward_compares_with_are_named(
    name: str, max_prompts: int | None, is_seen: bool, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "solution": "2"}\n')
    tree = minimal_tree()
    tree["prompts"] |= {"source": str(rows), "chat_template": False}
    tree["reward"] = {"name": name}
    with pytest.raises(ConfigError, match=r"row 1 \(from 0\): the row has no .*prompts\.columns"):
        require_answers(Config.model_validate(tree), trains=True)
    tree["evaluation"] = {"sets": [{"name": "a", "source": str(rows), "max_prompts": max_prompts}]}
    config = Config.model_validate(tree)
    if not is_seen:
        require_answers(config, trains=False)
        return
    with pytest.raises(ConfigError, match=r"row 1 \(from 0\)"):
        require_answers(config, trains=False)


def test_other_rewards_and_columns_that_are_named_need_no_answer(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "solution": "1"}\n')
    prompts: dict[str, Any] = {"source": str(rows), "chat_template": False}
    require_answers(config_of(prompts=prompts | {"columns": {"answer": "solution"}}), trains=True)
    require_answers(config_of(prompts=prompts, reward={"name": "python:reward.py:f"}), trains=True)


@pytest.mark.parametrize(("of_part", "is_refused"), [("regex", False), ("exact", True), (["regex", "exact"], True)])
@pytest.mark.parametrize("column", [None, "kind"])
def test_a_mixtures_part_needs_the_answers_of_its_own_rewards_alone(
    of_part: str | list[str], is_refused: bool, column: str | None, tmp_path: Path
) -> None:
    good, bare = tmp_path / "good.jsonl", tmp_path / "bare.jsonl"
    good.write_text('{"prompt": "a", "answer": "1"}\n')
    bare.write_text('{"prompt": "b"}\n')
    tree = minimal_tree()
    mixture = [
        {"name": "good", "source": str(good), "reward": "exact"},
        {"name": "bare", "source": str(bare), "reward": of_part},
    ]
    tree["prompts"] = {"prompts_per_batch": 2, "chat_template": False, "mixture": mixture}
    tree["reward"] = {"parts": [{"name": "exact"}, {"name": "regex"}], "column": column}
    config = Config.model_validate(tree)
    if not is_refused:
        require_answers(config, trains=True)
        return
    with pytest.raises(ConfigError, match=r"bare\.jsonl', row 0 \(from 0\): the row has no answer"):
        require_answers(config, trains=True)


def test_single_rows_without_an_answer_are_left_out_of_a_run_and_no_reason_to_refuse_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    config = config_of(prompts={"source": str(rows), "chat_template": False, "columns": {"answer": "solution"}})
    rows.write_text('{"prompt": "a"}\n{"prompt": "b", "solution": " "}\n{"prompt": "c", "solution": "1"}\n')
    require_answers(config, trains=True)
    rows.write_text('{"prompt": "a"}\n{"prompt": "b", "solution": " "}\n')
    with pytest.raises(ConfigError, match=r"row 0 \(from 0\): the row has no 'answer'"):
        require_answers(config, trains=True)


def test_a_parameter_that_no_row_gives_is_named_and_one_that_some_row_lacks_is_not(tmp_path: Path) -> None:
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "reward.py"
    reward.write_text("def f(completions, solution, **kwargs): ...\ndef own(prompt, responses, row): ...\n")
    config = config_of(prompts={"source": str(rows), "chat_template": False}, reward={"name": f"python:{reward}:f"})
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "solution": null}\n')
    with pytest.raises(ConfigError, match=r"takes solution, but the first rows have only answer, prompt: .*columns"):
        require_columns(config, trains=True)
    rows.write_text('{"prompt": "a"}\n{"prompt": "b", "solution": "1"}\n')
    require_columns(config, trains=True)
    rows.unlink()
    require_columns(config, trains=True)
