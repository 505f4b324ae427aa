"""What a tracker may do to a run: nothing. Scripted trackers, in real threads."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from async_rl.config.secrets import MASK, masked
from async_rl.config.sections import TrackingSection
from async_rl.records.trackers import tracker_thread
from async_rl.records.trackers.choice import open_trackers
from async_rl.records.trackers.fan_out import Trackers, figures_of
from async_rl.records.trackers.logged_steps import LoggedSteps
from async_rl.records.trackers.tracker import Figures, Row
from async_rl.records.trackers.tracker_thread import TrackerThread
from async_rl.shared.programs.extras import MODULES

SAMPLE = {
    "iteration": 0,
    "index": 3,
    "prompt_id": "7",
    "weight_version": "v",
    "prompt": "1 + 1?",
    "responses": [
        {"text": "2", "reward": 1.0, "num_tokens": 1, "finish_reason": "stop"},
        {"text": "3", "reward": 0.0, "num_tokens": 1, "finish_reason": "stop"},
    ],
}


class Scripted:
    """Remembers what it got; fails at some steps, and may wait for an event first."""

    def __init__(
        self,
        fails_at: Sequence[int] = (),
        waits_for: threading.Event | None = None,
        error: type[BaseException] = ConnectionError,
    ) -> None:
        self._error = error
        self.figures: list[tuple[int, dict[str, float]]] = []
        self.rows: list[Row] = []
        self.is_closed = False
        self._fails_at = fails_at
        self._waits_for = waits_for

    def log(self, step: int, figures: Figures) -> None:
        if self._waits_for is not None:
            self._waits_for.wait()
        if step in self._fails_at:
            raise self._error(f"no answer at step {step}")
        self.figures.append((step, dict(figures)))

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        self.rows += rows

    def close(self) -> None:
        self.is_closed = True


def record(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "iterations": 9, "loss": 0.5, "on_policy": True, "mfu": None, "spans": []}


def test_every_tracker_gets_records_evaluations_and_samples_and_is_closed() -> None:
    both = Scripted(), Scripted()
    trackers = Trackers([TrackerThread(f"t{i}", lambda each=each: each) for i, each in enumerate(both)])
    trackers.log_record(record(0))
    trackers.log_samples(0, [SAMPLE])
    trackers.log_evaluation(0, "held-out", {"pass@1": 0.25, "odd": float("nan")})
    trackers.close()
    for each in both:
        assert each.figures == [(0, {"loss": 0.5}), (0, {"eval/held-out/pass@1": 0.25})]
        assert [(row["prompt"], row["response"], row["reward"]) for row in each.rows] == [
            ("1 + 1?", "2", 1.0),
            ("1 + 1?", "3", 0.0),
        ]
        assert each.is_closed


def test_only_numbers_are_figures() -> None:
    assert figures_of({**record(1), "num_groups": 4, "weight_version": "v"}) == {"loss": 0.5, "num_groups": 4}


def test_a_tracker_that_fails_is_reported_once_and_the_others_miss_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failing, sound = Scripted(fails_at=(1, 2)), Scripted()
    trackers = Trackers([TrackerThread("broken", lambda: failing), TrackerThread("sound", lambda: sound)])
    for iteration in range(5):
        trackers.log_record(record(iteration))
    trackers.close()
    assert [step for step, _ in sound.figures] == [0, 1, 2, 3, 4]
    assert [step for step, _ in failing.figures] == [0, 3, 4], "a fault that passes costs its own entries"
    assert caplog.text.count("no answer at step") == 1
    assert "tracker broken missed 2 entries" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_a_tracker_that_exits_is_reported_like_one_that_fails(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    exiting = Scripted(fails_at=(1,), error=error)
    trackers = Trackers([TrackerThread("exiting", lambda: exiting)])
    for iteration in range(4):
        trackers.log_record(record(iteration))
    trackers.close()
    assert [step for step, _ in exiting.figures] == [0, 2, 3] and exiting.is_closed
    assert "tracker exiting missed 1 entries" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_tracker_that_does_not_start_is_reported_and_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def make() -> Scripted:
        raise error("no such account")

    trackers = Trackers([TrackerThread("absent", make)])
    for iteration in range(3):
        trackers.log_record(record(iteration))
    trackers.close()
    assert f"tracker absent: it did not start: {error.__name__}: no such account" in caplog.text


def test_a_tracker_that_hangs_neither_slows_the_run_nor_keeps_it_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_thread, "CLOSE_TIMEOUT_S", 0.2)
    never = threading.Event()
    thread = TrackerThread("stuck", lambda: Scripted(waits_for=never), max_waiting=10)
    trackers = Trackers([thread])
    for iteration in range(1000):
        trackers.log_record(record(iteration))
    trackers.close()
    assert caplog.text.count("items behind") == 1
    assert "tracker stuck did not end within 0 s" in caplog.text
    never.set()


def test_what_a_resumed_run_trains_again_is_not_logged_again(tmp_path: Path) -> None:
    attempts = []
    for steps in ((0, 1, 2), (1, 2, 3)):
        tracker = Scripted()
        trackers = Trackers([TrackerThread("t", lambda each=tracker: each, LoggedSteps(tmp_path, "t"))])
        for step in steps:
            trackers.log_record(record(step))
            trackers.log_samples(step, [{**SAMPLE, "iteration": step}])
        trackers.close()
        attempts.append(([step for step, _ in tracker.figures], [row["iteration"] for row in tracker.rows]))
    assert attempts == [([0, 1, 2], [0, 0, 1, 1, 2, 2]), ([3], [3, 3])]


def test_a_run_keeps_its_key_when_it_resumes_and_a_broken_file_means_a_new_run(tmp_path: Path) -> None:
    first = LoggedSteps(tmp_path, "t")
    first.mark_logged("metrics", 4)
    again = LoggedSteps(tmp_path, "t")
    assert again.key == first.key and not again.is_new("metrics", 4) and again.is_new("metrics", 5)
    assert again.is_new("samples", 0)
    (tmp_path / "trackers" / "t.json").write_text('{"key": "a", "last": [1')
    assert LoggedSteps(tmp_path, "t").key != first.key


def test_secrets_are_masked_and_numbers_and_places_of_secrets_are_not() -> None:
    config = {
        "rollout": {"max_response_tokens": 512, "stop": ["token"], "stop_token_ids": [1, 2]},
        "reward": {"url": "https://me:hunter2@host/v1?api_key=abc&n=1", "token_file": "/etc/judge", "api_key": "abc"},
        "cluster": {"env": {"WANDB_API_KEY": "abc", "HFTOKEN": "abc", "DB_PWD": "abc", "OMP_NUM_THREADS": "1"}},
        "inference": {"engine_options": ["--api-key", "abc", "--max-num-seqs", "9"]},
        "parts": [{"password": "abc"}],
        "none": None,
    }
    assert masked("", config) == {
        "rollout": {"max_response_tokens": 512, "stop": ["token"], "stop_token_ids": [1, 2]},
        "reward": {"url": f"https://{MASK}@host/v1?api_key={MASK}&n=1", "token_file": "/etc/judge", "api_key": MASK},
        "cluster": {"env": {"WANDB_API_KEY": MASK, "HFTOKEN": MASK, "DB_PWD": MASK, "OMP_NUM_THREADS": "1"}},
        "inference": {"engine_options": ["--api-key", MASK, "--max-num-seqs", "9"]},
        "parts": [{"password": MASK}],
        "none": None,
    }


def test_a_tracker_whose_files_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file where the directory should be")
    trackers = open_trackers(TrackingSection(), tmp_path, 0, {})
    with caplog.at_level(logging.ERROR):
        trackers.log_record(record(0))
        trackers.close()
    assert "tracker tensorboard: it did not start: WriteFailed" in caplog.text


def test_each_tracker_but_tensorboard_is_an_extra_of_its_name() -> None:
    every = get_args(get_args(TrackingSection.model_fields["trackers"].annotation)[0])
    assert TrackingSection(trackers=every).extras == tuple(name for name in every if name != "tensorboard")
    assert set(TrackingSection(trackers=every).extras) <= MODULES.keys()
    assert TrackingSection().extras == ()
