"""Opens the trackers that a config names; for `trainer.session`."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rl.config.secrets import masked
from async_rl.config.sections import TrackingSection
from async_rl.records.trackers.fan_out import Trackers
from async_rl.records.trackers.logged_steps import LoggedSteps
from async_rl.records.trackers.tracker import TrackedRun, Tracker
from async_rl.records.trackers.tracker_thread import TrackerThread

TENSORBOARD = "tensorboard"
"""The one that takes steps back: a resumed run's event file says where it begins."""


def open_trackers(section: TrackingSection, run_dir: Path, first_iteration: int, config: Mapping[str, Any]) -> Trackers:
    """Starts a thread for each tracker; `config` is the run's, with secrets, which are masked here."""
    shown = masked("", config)

    def start(name: str) -> TrackerThread:
        logged = LoggedSteps(run_dir, name)
        run = TrackedRun(run_dir, section.project, run_dir.resolve().name, logged.key, first_iteration, shown)
        return TrackerThread(name, lambda: _make(name, run), None if name == TENSORBOARD else logged)

    return Trackers([start(name) for name in dict.fromkeys(section.trackers)])


def _make(name: str, run: TrackedRun) -> Tracker:
    # Imported in the tracker's thread: each of these packages takes seconds, and only the run's own are installed.
    module: Any = import_module(f"async_rl.records.trackers.{name}_tracker")
    make: Callable[[TrackedRun], Tracker] = module.make_tracker
    return make(run)
