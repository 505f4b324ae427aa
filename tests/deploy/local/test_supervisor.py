"""What the launcher does about a request to end instances, whoever wrote it: it ends what it has started, once."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.config.sections import Config
from async_rl.shared.programs.end_request import REQUEST_FILE, ask_to_end, asked_to_end, is_answered
from deploy.cluster.process import Process
from deploy.cluster.run_view import RunView
from deploy.local import supervisor
from deploy.local.processes import Deployment
from deploy.local.supervisor import Supervisor
from tests.support.minimal_config import minimal_tree

pytestmark = pytest.mark.distributed

OWN, OTHER = "http://127.0.0.1:7001", "http://127.0.0.1:7002"
WAITS = "while [ ! -e {} ]; do sleep 0.05; done"


class Ground:
    """A launcher with an instance that waits, and a trainer that is done when `end` is called."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self.folder, self.said = folder, cast(list[str], [])
        self._deployment = deployment
        config = Config.model_validate(minimal_tree() | {"run": {"dir": str(folder)}})
        instance, trainer = self._started("instance", "sleep 600"), self._started("trainer", WAITS.format("end"))
        view = cast(RunView, self)
        self._supervisor = Supervisor([OWN], config, deployment, [instance], trainer, view)
        self._thread = threading.Thread(target=self._run)
        self._fault: BaseException | None = None
        self._thread.start()

    def _started(self, role: Any, command: str) -> Any:
        log = self.folder / f"{role}.log"
        return self._deployment.start(Process(role, role, ("sh", "-c", f"cd {self.folder}; {command}"), log))

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except BaseException as error:
            self._fault = error

    def note(self, text: str) -> None:
        self.said.append(text)

    def tick(self) -> None:
        pass

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert condition() and self._fault is None, (self._fault, self.said)

    def pause(self) -> None:
        """It has looked at the request several times."""
        time.sleep(0.7)

    def end(self) -> None:
        """Its trainer is done; raises what the launcher has failed with."""
        (self.folder / "end").touch()
        self._thread.join(30)
        assert not self._thread.is_alive(), self.said
        if self._fault is not None:
            raise self._fault


@pytest.fixture
def make_ground(tmp_path: Path) -> Iterator[Callable[[], Ground]]:
    grounds: list[Ground] = []
    with Deployment() as deployment:

        def make() -> Ground:
            grounds.append(Ground(tmp_path, deployment))
            return grounds[-1]

        yield make
        for ground in grounds:
            ground.end()


def test_what_is_no_request_and_instances_of_others_end_nothing(
    tmp_path: Path, make_ground: Callable[[], Ground]
) -> None:
    request = tmp_path / REQUEST_FILE
    request.mkdir()
    ground = make_ground()
    ground.pause()
    request.rmdir()
    for content in ("{", "[1]", f'{{"{OWN}": 3}}'):
        request.write_text(content)
        ground.pause()
    ask_to_end(tmp_path, {OTHER: "it hangs", f"{OWN}/": "it hangs"})
    ground.pause()
    assert not ground.said
    # It would tell the producer that they have ended.
    assert not is_answered(tmp_path)
    ground.end()


def test_of_a_request_that_names_others_too_its_own_is_ended_once_and_it_is_not_answered(
    tmp_path: Path, make_ground: Callable[[], Ground]
) -> None:
    ground = make_ground()
    ask_to_end(tmp_path, {OWN: "it hangs", OTHER: "it hangs"})
    ground.wait_until(lambda: len(ground.said) == 2)
    ground.pause()
    assert len(ground.said) == 2 and not is_answered(tmp_path)
    ask_to_end(tmp_path, {OWN: "it hangs"})
    ground.wait_until(lambda: is_answered(tmp_path))


def test_a_request_of_its_own_alone_is_answered_when_they_have_ended(
    tmp_path: Path, make_ground: Callable[[], Ground]
) -> None:
    ground = make_ground()
    ask_to_end(tmp_path, {OWN: "it hangs"})
    ground.wait_until(lambda: is_answered(tmp_path))
    ground.wait_until(lambda: len(ground.said) == 2)
    assert "it hangs" in ground.said[0] and "started again (restart 1)" in ground.said[1]


def test_a_request_that_comes_while_the_launcher_looks_is_not_lost(
    tmp_path: Path, make_ground: Callable[[], Ground], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[dict[str, str]] = []

    def look(run_dir: Path) -> dict[str, str]:
        looked.append(asked_to_end(run_dir))
        if len(looked) == 1:
            ask_to_end(run_dir, {OWN: "it hangs"})
        return looked[-1]

    monkeypatch.setattr(supervisor, "asked_to_end", look)
    ground = make_ground()
    ground.wait_until(lambda: len(ground.said) == 2)
    ground.wait_until(lambda: is_answered(tmp_path))
    assert looked[0] == {} and "it hangs" in ground.said[0]
