import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed

COMMANDS = ("quickstart", "init", "check", "doctor", "run", "launch", "status", "export", "serve", "fleet", "eval")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from async_rl.cli import main; main()", *arguments], capture_output=True, text=True
    )


def test_help_lists_every_command() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    assert all(command in answer.stdout for command in COMMANDS)


def test_version_is_printed() -> None:
    assert run("--version").stdout.strip()[0].isdigit()


def test_an_unknown_command_is_named_with_what_was_expected() -> None:
    answer = run("qickstart")
    assert answer.returncode == 2
    assert "unknown command 'qickstart': did you mean 'quickstart'? expected one of quickstart, init," in answer.stderr
