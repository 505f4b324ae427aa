import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "deploy.launch", *words], capture_output=True, text=True, timeout=120)


def test_help_lists_every_engine() -> None:
    answer = launch("--help")
    assert answer.returncode == 0
    assert all(engine in answer.stdout for engine in ("ray", "slurm", "kubernetes"))


def test_without_an_engine_it_does_nothing() -> None:
    answer = launch()
    assert answer.returncode == 2 and "usage: async-rl launch ENGINE" in answer.stderr


def test_an_unknown_engine_is_named_with_the_near_one() -> None:
    answer = launch("slrum", "run.toml")
    assert answer.returncode == 2
    assert "unknown engine 'slrum': did you mean 'slurm'?" in answer.stderr


def test_the_engines_own_options_are_passed_on() -> None:
    answer = launch("slurm", "--help")
    assert answer.returncode == 0 and "async-rl launch slurm" in answer.stdout and "--dry-run" in answer.stdout


def test_a_config_that_is_missing_ends_before_anything_is_submitted() -> None:
    answer = launch("slurm", "no-such.toml")
    assert answer.returncode == 2 and "no-such.toml" in answer.stderr
