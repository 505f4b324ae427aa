"""Whether a rollout program is there, told from its text, and what it needs."""

from pathlib import Path

import pytest

from async_rl.checks.preflight.user_file import require_program
from async_rl.errors import ConfigError
from async_rl.shared.programs import extras
from tests.support.rollout_settings import rollout_section


def require(folder: Path, text: str, **settings: str) -> None:
    (folder / "program.py").write_text(text)
    require_program(rollout_section(**{"program": f"python:{folder / 'program.py'}:rollout", **settings}))


def test_programs_that_are_there_pass(tmp_path: Path) -> None:
    require(tmp_path, "async def rollout(prompt, policy): ...")
    require(tmp_path, "@asynchronous\ndef rollout(prompt, policy): ...\ndef asynchronous(function): ...")
    require(tmp_path, "def rollout(prompt, policy): ...\nrollout = asynchronous(rollout)")
    require(tmp_path, "async def rollout(prompt, policy):\n    async def parts():\n        yield 1\n    return 1.0")
    require_program(rollout_section())


@pytest.mark.parametrize(
    ("text", "program", "message"),
    [
        (
            "async def other(prompt, policy): ...",
            None,
            r"rollout\.program .*has no function 'rollout'; it has \['other'\]",
        ),
        ("import no_such_module", None, r"rollout\.program .*line 1: there is no module 'no_such_module'"),
        ("def rollout(prompt, policy): ...", None, r"rollout\.program .*line 1: the function is not asynchronous"),
        ("async def rollout(prompt, policy):\n    yield 1.0", None, r"rollout\.program .*line 1: .* is a generator"),
        ("async def rollout(", None, r"rollout\.program .*correct the file"),
        ("", "python:nowhere.py:rollout", "there is no file 'nowhere.py'"),
        ("", "python:nowhere.py", "there is no file"),
        ("", "two_turns", "expected single_turn, python:path/to/file.py:function, or command:"),
        ("", "command:no-such-program", "there is no program 'no-such-program'"),
    ],
)
def test_programs_that_are_not_there_are_named(tmp_path: Path, text: str, program: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require(tmp_path, text, **({"program": program} if program else {}))


def test_a_renderer_whose_package_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MODULES, "agents", ("no_such_module",))
    with pytest.raises(
        ConfigError, match=r"rollout\.options\.renderer = 'auto' needs no_such_module.*async-rl\[agents\]"
    ):
        require(tmp_path, "async def rollout(prompt, policy): ...")
    require(tmp_path, "async def rollout(prompt, policy): ...", renderer="template")


@pytest.mark.parametrize("name", ["qwen-3", "", "Qwen/Qwen3-8B", "AUTO"])
def test_a_renderer_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"rollout\.options\.renderer is '{name}': expected auto, template, .*qwen3.*any model"
    ):
        require(tmp_path, "async def rollout(prompt, policy): ...", renderer=name)
    # Nothing is rendered in a single turn.
    require_program(rollout_section(renderer=name))


@pytest.mark.parametrize("name", ["auto", "template", "qwen3", "llama-3"])
def test_renderers_that_exist_pass(tmp_path: Path, name: str) -> None:
    require(tmp_path, "async def rollout(prompt, policy): ...", renderer=name)
