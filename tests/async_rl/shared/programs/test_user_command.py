"""`command:` settings: what can be started, and what the error names if it cannot."""

from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.programs.user_command import split_command


def test_words_are_those_of_a_shell() -> None:
    assert split_command("rollout.program", "command:sh -c 'echo a b'") == ["sh", "-c", "echo a b"]


@pytest.mark.parametrize(
    "name, error",
    [
        ("command:", "there is no program ''"),
        ("command:no-such-program x", "there is no program 'no-such-program'"),
        ("command:sh -c 'open", "cannot be split into words: No closing quotation"),
    ],
)
def test_what_cannot_be_started_is_named(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.program ") as raised:
        split_command("rollout.program", name)
    assert error in str(raised.value)


def test_a_file_that_must_not_be_executed_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    agent = tmp_path / "an agent.py"
    agent.write_text("print()")
    with pytest.raises(ConfigError, match="must not be executed") as raised:
        split_command("rollout.program", f"command:'{agent}' --fast")
    assert f"command:python '{agent}'" in str(raised.value)
    agent.chmod(0o755)
    assert split_command("rollout.program", f"command:'{agent}' --fast") == [str(agent), "--fast"]
