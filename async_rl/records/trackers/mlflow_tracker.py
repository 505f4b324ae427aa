"""MLflow; MLFLOW_TRACKING_URI says where runs go. Samples are artifacts in the format of MLflow's tables."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from async_rl.records.trackers.tracker import SAMPLE_COLUMNS, Figures, Row, TrackedRun

_NOT_IN_A_NAME = re.compile(r"[^\w\-. /:]")
"""MLflow refuses names with other characters, such as that of pass@2."""

_MAX_PARAM = 500
"""Characters of a value, the least that MLflow's stores accept; `config.json` has them whole."""

_KEY = "async_rl.key"


class MlflowTracker:
    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        self._run_id = self._find(run) or self._create(run)

    def log(self, step: int, figures: Figures) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(_NOT_IN_A_NAME.sub("_", name), value, now_ms, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        table = {"columns": list(SAMPLE_COLUMNS), "data": [[row[name] for name in SAMPLE_COLUMNS] for row in rows]}
        self._client.log_dict(self._run_id, table, f"samples/iteration-{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _find(self, run: TrackedRun) -> str | None:
        """The run that this one resumes."""
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            return None
        found = self._client.search_runs([experiment.experiment_id], f"tags.`{_KEY}` = '{run.key}'", max_results=1)
        for each in found:
            self._client.update_run(each.info.run_id, status="RUNNING")
            return str(each.info.run_id)
        return None

    def _create(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        run_id = str(self._client.create_run(experiment_id, run_name=run.name, tags={_KEY: run.key}).info.run_id)
        self._client.log_batch(run_id, params=[Param(name, value[:_MAX_PARAM]) for name, value in _flat(run.config)])
        self._client.log_dict(run_id, dict(run.config), "config.json")
        return run_id


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`section.key` -> its value as JSON."""
    for section, value in config.items():
        keys = value if isinstance(value, Mapping) else {"": value}
        for key, each in keys.items():
            yield f"{section}.{key}".rstrip("."), json.dumps(each)


def make_tracker(run: TrackedRun) -> MlflowTracker:
    return MlflowTracker(run)
