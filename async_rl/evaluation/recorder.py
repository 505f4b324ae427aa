"""One record per evaluation and set -> `evaluations.jsonl`, the trackers and the log."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_rl.evaluation.intervals import Interval
from async_rl.files import append_lines
from async_rl.tracking.run_records import EVALUATIONS, describe_evaluation
from async_rl.tracking.trackers.fan_out import Trackers
from async_rl.types import WeightVersion

log = logging.getLogger(__name__)

"""In the directory of a run."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """The figures of a set's prompts that come from one source, and their confidence intervals."""

    num_prompts: int
    figures: Mapping[str, float]
    intervals: Mapping[str, Interval]

    def record(self) -> dict[str, Any]:
        """The figures on one level, the intervals below `intervals`."""
        return {"num_prompts": self.num_prompts, **self.figures, "intervals": dict(self.intervals)}


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one evaluation on one set, all of one weight version.

    `num_prompts` of the set's `total_prompts` were sampled and scored in time; for `num_failed` others, an instance or
    the reward failed. `figures` are over all prompts, and empty if some are missing, since prompts with short responses
    finish first. `seconds` is the time of the whole evaluation, which began at the Unix time `started_unix_s`; training
    waited for its last `delay_s`.
    `intervals` are those of the figures that have one; `sources` has the figures of each source, if there are several.
    """

    iteration: int
    weight_version: WeightVersion
    set: str
    num_prompts: int
    total_prompts: int
    num_failed: int
    num_samples: int
    temperature: float
    seconds: float
    figures: Mapping[str, float]
    started_unix_s: float
    delay_s: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    sources: Mapping[str, SourceResult] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.num_prompts == self.total_prompts

    def record(self) -> dict[str, Any]:
        """The line of `evaluations.jsonl`: the fields and the figures, on one level; `intervals` and `sources` are
        objects, which are left out where they are empty."""
        fields = asdict(self)
        figures, _, _ = (fields.pop(name) for name in ("figures", "intervals", "sources"))
        nested = {"intervals": dict(self.intervals), "sources": {k: v.record() for k, v in self.sources.items()}}
        kept = {name: value for name, value in nested.items() if value}
        return {**fields, "complete": self.is_complete, **figures, **kept}


class EvaluationRecorder:
    """Writes the results of a run's evaluations. `require_lease` is called right before each write, and raises if
    another trainer writes the file by now; `trackers`, which their owner closes, get the figures too."""

    def __init__(
        self, run_dir: Path, require_lease: Callable[[], None] = lambda: None, trackers: Trackers | None = None
    ) -> None:
        self._path = run_dir / EVALUATIONS
        self._require_lease = require_lease
        self._trackers = trackers or Trackers()

    def write(self, results: Sequence[SetResult]) -> None:
        self._require_lease()
        append_lines(self._path, (json.dumps(result.record()) for result in results))
        for result in results:
            log.info("%s", describe_evaluation(result.record()))
            self._trackers.log_evaluation(result.iteration, result.set, result.figures)
