"""What counts as the loss of vLLM's engine, and what is only slow; without processes."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from async_rl.errors import NoAnswer
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.net.http_client import HttpClient, HttpResponse
from inference_service.vllm.server import NUM_LOST, EngineWatch

SILENT = 0
ENGINE, TRACKER = 101, 102


class Health:
    """Answers health checks with these statuses, one after the other."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self._statuses = list(statuses)

    def get(self, path: str) -> HttpResponse:
        status = self._statuses.pop(0)
        if status == SILENT:
            raise NoAnswer("timed out")
        return HttpResponse(status, "", b"")


def found(statuses: Sequence[int], *, now: frozenset[int] = frozenset({ENGINE, TRACKER})) -> list[str | None]:
    """What each look finds; `now` are the server's processes after it was healthy."""
    parts = [frozenset({ENGINE, TRACKER})]
    watch = EngineWatch(cast(Any, Health(statuses)), lambda: parts[-1])
    parts.append(now)
    return [watch.find_loss() for _ in statuses]


@pytest.mark.parametrize("statuses", [[200] * 5, [SILENT] * 5, [503, 503, 200, 503, 503], [401, 500, SILENT, 500]])
def test_a_slow_server_or_a_passing_fault_is_no_loss(statuses: list[int]) -> None:
    assert found(statuses) == [None] * len(statuses)


def test_a_server_that_says_again_and_again_that_its_engine_died_is_lost() -> None:
    assert found([200, *[503] * NUM_LOST])[-2:] == [None, "it answers 503 to health checks"]


def test_a_silent_server_is_lost_once_a_process_of_its_own_is_gone() -> None:
    assert found([SILENT] * NUM_LOST, now=frozenset({TRACKER}))[-1] == (
        f"its process {ENGINE} has ended, and it does not answer"
    )
    assert found([200] * NUM_LOST, now=frozenset({TRACKER}))[-1] is None, "a helper, not the engine"


def test_a_server_that_refuses_connections_is_lost() -> None:
    watch = EngineWatch(HttpClient(f"http://127.0.0.1:{free_ports(1)[0]}", 2.0), frozenset)
    assert [watch.find_loss() for _ in range(NUM_LOST)][-1] == "it takes no more connections: Connection refused"
