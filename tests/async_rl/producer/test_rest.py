"""Who may keep a device from the trainer, and what is done about it, with a launcher that answers or does not."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import InstanceError, InstanceUnreachable
from async_rl.producer import rest
from async_rl.producer.rest import Rest
from async_rl.rollouts.pool.member import Member
from async_rl.shared.programs.end_request import REQUEST_FILE, asked_to_end, is_answered, withdraw
from tests.support.members import ready_member

HUNG = InstanceUnreachable("no answer to /sleep within 5 s")


class Sleepers:
    """A pool of which some instances do not go to sleep."""

    def __init__(self, **awake: InstanceError) -> None:
        self.awake: dict[Member, InstanceError] = {ready_member(name): error for name, error in awake.items()}

    async def sleep(self, timeout_s: float) -> dict[Member, InstanceError]:
        assert timeout_s == 5.0
        return dict(self.awake)


def begin(
    pool: Any, folder: Path, launcher: Callable[[dict[str, str]], object] | None, resting: Rest | None = None
) -> Rest:
    resting = resting or Rest(pool, folder, 5.0)

    async def launch() -> None:
        while True:
            if launcher is not None and (asked := asked_to_end(folder)):
                launcher(asked)
                withdraw(folder)
            await asyncio.sleep(0.01)

    async def both() -> None:
        beside = asyncio.create_task(launch())
        await resting.begin()
        beside.cancel()

    asyncio.run(both())
    return resting


def test_the_launcher_is_asked_to_end_those_that_stay_awake_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[dict[str, str]] = []
    pool = Sleepers(a=HUNG, b=InstanceError("refuses"))
    resting = begin(pool, tmp_path, asked.append)
    assert asked == [{"http://a:1": f"did not go to sleep: {HUNG}", "http://b:1": "did not go to sleep: refuses"}]
    said = caplog.text
    assert "http://a:1 holds memory that the trainer needs: it did not go to sleep: no answer" in said
    assert "the launcher has ended http://a:1, http://b:1" in said and "by hand" not in said
    # What is silent there now is a process that is being started.
    begin(pool, tmp_path, asked.append, resting)
    assert len(asked) == 1


def test_without_a_launcher_it_goes_on_with_the_remedy_and_leaves_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "END_TIMEOUT_S", 0.3)
    begin(Sleepers(a=HUNG), tmp_path, None)
    assert "not all of http://a:1 have been ended" in caplog.text and "by hand" in caplog.text
    assert not (tmp_path / REQUEST_FILE).exists()


@pytest.mark.parametrize("content", ["{", "[1]", "null", '{"http://a:1": 3}', "[" * 100_000, b"\xff"])
def test_what_is_no_request_asks_for_nothing_and_is_no_answer(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / REQUEST_FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert asked_to_end(tmp_path) == {} and not is_answered(tmp_path)
    withdraw(tmp_path)
    assert is_answered(tmp_path)


def test_a_directory_in_the_requests_place_stays_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / REQUEST_FILE).mkdir()
    begin(Sleepers(a=HUNG), tmp_path, None)
    assert "the launcher cannot be asked to end them" in caplog.text
    assert asked_to_end(tmp_path) == {} and (tmp_path / REQUEST_FILE).is_dir()


def test_nothing_is_asked_where_all_sleep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    begin(Sleepers(), tmp_path, None)
    assert not caplog.records and not list(tmp_path.iterdir())
