"""What needs no verifiers: mistakes in names and data, and a Python that cannot serve; the rest is in
`../gateway/test_real_verifiers.py`."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError
from async_rl.parts.environments.failure import EnvironmentFailed
from async_rl.parts.environments.verifiers import VerifiersEnvironment
from async_rl.parts.environments.verifiers_rows import main
from async_rl.rollouts.agents.program import ProgramPrompt
from async_rl.rollouts.agents.turn import LimitReached


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "env.toml"
    path.write_text('[env.taskset]\nid = "several"\n')
    return str(path)


def prompt(**row: Any) -> ProgramPrompt:
    return ProgramPrompt(prompt_id="7", token_ids=(3,), row=row, base_url="http://127.0.0.1:9/r/key/v1")


def test_a_config_and_a_python_that_are_not_there_are_named(config: str) -> None:
    with pytest.raises(ConfigError, match=r"no config of verifiers at 'gone.toml': write \[env.taskset\]"):
        VerifiersEnvironment("gone.toml", sys.executable)
    with pytest.raises(ConfigError, match=r"no Python at 'venv/bin/python': make one .* verifiers==0.4.0 uv"):
        VerifiersEnvironment(config, "venv/bin/python")


def test_a_row_without_a_task_says_how_to_write_the_data(config: str) -> None:
    environment = VerifiersEnvironment(config, sys.executable)
    with pytest.raises(ConfigError, match=r"'7' has no task \(it has \['prompt'\]\): write the data with"):
        asyncio.run(environment.play(prompt(prompt="?")))


@pytest.mark.parametrize("code", ["rollout_limit_reached", "context_length_exceeded"])
def test_an_agent_that_failed_at_a_limit_of_the_gateway_is_an_outcome(config: str, code: str) -> None:
    environment = VerifiersEnvironment(config, sys.executable)
    fault = f'ProviderError: upstream 400: {{"error": {{"code": "{code}"}}}}'
    assert isinstance(environment._failure(fault), LimitReached)
    assert isinstance(environment._failure("ProviderError: upstream 500"), EnvironmentFailed)


@pytest.mark.distributed
def test_a_python_without_verifiers_is_started_once_for_all_that_wait(
    config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = VerifiersEnvironment(config, sys.executable)

    async def play() -> list[Any]:
        playing = (environment.play(prompt(task={})) for _ in range(8))
        return await asyncio.gather(*playing, return_exceptions=True)

    failures = asyncio.run(play())
    assert {type(failure) for failure in failures} == {EnvironmentFailed}
    assert {str(failure).partition("env.toml: ")[2] for failure in failures} == {
        "ModuleNotFoundError: No module named 'verifiers'"
    }
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.distributed
def test_a_python_that_is_none_ends_with_a_reason(config: str) -> None:
    environment = VerifiersEnvironment(config, "/bin/false")
    with pytest.raises(EnvironmentFailed, match=r"/bin/false cannot serve .*: see its output, above"):
        asyncio.run(environment.play(prompt(task={})))


def test_rows_of_no_config_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gone.toml", "--python", sys.executable]) == 2
    assert "no config of verifiers at 'gone.toml'" in capsys.readouterr().err
