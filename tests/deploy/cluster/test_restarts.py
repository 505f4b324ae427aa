import json
from pathlib import Path

import pytest

from deploy.cluster.restarts import MAX_DELAY_S, Restarts, may_restart, num_trained

URL = "http://10.0.0.1:8001"


def write_ledger(run_dir: Path, *rows: tuple[int, bool, list[str]]) -> None:
    lines = [
        {"iteration": iteration, "on_policy": proven, "logprob_gaps": {"instances": {url: {} for url in urls}}}
        for iteration, proven, urls in rows
    ]
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("code", "cause", "again"),
    [
        (0, None, False),
        (1, None, True),
        (1, "NoInstanceLeft", True),
        (1, "PublishError", True),
        (1, "SomeErrorOfAUser", True),
        (137, None, True),
        (139, None, True),
        # torchrun exits with 1 whatever its ranks exited with, so the named error decides.
        (1, "ConfigError", False),
        (1, "OnPolicyViolation", False),
        (1, "RewardError", False),
        (1, "RunStopped", False),
        (2, None, False),
        (3, None, False),
        (4, None, False),
        (5, None, False),
        (143, None, False),
    ],
)
def test_a_task_is_started_again_after_faults_that_may_pass(code: int, cause: str | None, again: bool) -> None:
    assert may_restart(code, cause) is again


def test_delays_double_up_to_a_minute_and_end_with_the_limit() -> None:
    restarts = Restarts(limit=8)
    assert [restarts.next_delay_s() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    assert restarts.total == 8


def test_delays_stay_a_minute_however_many_restarts_are_allowed() -> None:
    restarts = Restarts(limit=3000, first_delay_s=1e-9)
    assert [restarts.next_delay_s() for _ in range(3000)][-1] == MAX_DELAY_S


def test_a_further_iteration_resets_count_and_delay_but_one_trained_again_does_not() -> None:
    restarts = Restarts(limit=2)
    restarts.note_progress(3)
    assert [restarts.next_delay_s(), restarts.next_delay_s(), restarts.next_delay_s()] == [1, 2, None]
    restarts.note_progress(3)
    assert restarts.next_delay_s() is None
    restarts.note_progress(2)  # Resumed from a checkpoint, it trained iteration 1 again.
    assert restarts.next_delay_s() is None
    restarts.note_progress(4)
    assert restarts.next_delay_s() == 1
    assert restarts.total == 3


def test_no_restarts_are_allowed_with_a_limit_of_0() -> None:
    assert Restarts(limit=0).next_delay_s() is None


def test_iterations_are_counted_that_the_ledger_proves(tmp_path: Path) -> None:
    assert num_trained(tmp_path) == 0
    write_ledger(tmp_path, (0, True, [URL]), (1, True, [URL]), (2, False, [URL]))
    assert num_trained(tmp_path) == 2
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"iteration": 3, "on_po')
    assert num_trained(tmp_path) == 2


def test_an_instance_progresses_with_iterations_that_it_took_part_in(tmp_path: Path) -> None:
    write_ledger(tmp_path, (0, True, [URL, "http://other:1"]), (1, True, ["http://other:1"]))
    assert num_trained(tmp_path, URL.__eq__) == 1
    assert num_trained(tmp_path, "http://other:1".__eq__) == 2
    assert num_trained(tmp_path, "http://third:1".__eq__) == 0
