"""torchrun's words and its patience with ranks, in releases of torch with and without the option."""

import argparse

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

from async_rl import torchrun

WORDS = ["--standalone", "--shutdown-timeout", "130", "-m", "async_rl.trainer", "run.toml"]


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What torchrun's own program was called with."""
    calls: list[list[str]] = []
    monkeypatch.setattr(run, "main", calls.append)
    # Put back afterwards, whatever the program sets it to.
    monkeypatch.setattr(PContext.close, "__defaults__", PContext.close.__defaults__)
    return calls


def test_the_option_is_passed_on_where_torchrun_has_it(passed_on: list[list[str]]) -> None:
    before = PContext.close.__defaults__
    torchrun.main(WORDS)
    assert (passed_on, PContext.close.__defaults__) == ([WORDS], before)


def test_older_releases_get_the_same_patience_without_the_option(
    passed_on: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "get_args_parser", argparse.ArgumentParser)
    torchrun.main(WORDS)
    assert passed_on == [["--standalone", "-m", "async_rl.trainer", "run.toml"]]
    assert PContext.close.__defaults__ == (None, 130)
