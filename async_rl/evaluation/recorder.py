"""What evaluations leave: one record per set in `evaluations.jsonl`, the trackers and the log of a run; the files that
`python -m async_rl.evaluation` writes.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from async_rl.evaluation.intervals import Interval
from async_rl.evaluation.sets import LoadedSet
from async_rl.method.types import Prompt, Response, Scores, WeightVersion
from async_rl.records.records import require_no_run
from async_rl.records.run_records import EVALUATIONS, describe_evaluation
from async_rl.records.trackers.fan_out import Trackers
from async_rl.shared.files import append_lines, named_write_errors, write_file

log = logging.getLogger(__name__)


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


PROGRESS, RESULTS, RESPONSES = "progress.jsonl", "results.jsonl", "responses.jsonl"

NUM_SHOWN = 12
"""The first prompts of each set, whose responses are written: enough to see what the figures mean."""


class Output:
    """Files of one evaluation: `PROGRESS` grows with every finished prompt, the others are written at the end.

    Raises:
        ConfigError: the directory is that of a run.
        WriteFailed: it, or a file in it, cannot be written; also of `on_scored` and `finish`.
    """

    def __init__(self, directory: Path, sets: Sequence[LoadedSet]) -> None:
        require_no_run(directory)
        with named_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._total = sum(len(loaded.prompts) for loaded in sets)
        first = [(loaded.name, prompt.prompt_id) for loaded in sets for prompt in loaded.prompts[:NUM_SHOWN]]
        self._shown: dict[tuple[str, str], Mapping[str, Any] | None] = dict.fromkeys(first)
        with named_write_errors(directory / PROGRESS):
            self._progress = (directory / PROGRESS).open("w", buffering=1)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()

    def on_scored(self, loaded: LoadedSet, prompt: Prompt, responses: Sequence[Response], scores: Scores) -> None:
        """Notes a finished prompt."""
        with named_write_errors(self._directory / PROGRESS):
            self._progress.write(json.dumps({"set": loaded.name, "total_prompts": self._total}) + "\n")
        key = (loaded.name, prompt.prompt_id)
        if key in self._shown:
            labels, values = [label for label, _ in scores.shown], [rewards for _, rewards in scores.shown]
            self._shown[key] = {
                "set": loaded.name,
                "prompt_id": prompt.prompt_id,
                "row": prompt.row,
                "responses": [
                    {
                        "text": response.text,
                        "finish_reason": response.finish_reason,
                        "reward": reward,
                        **({"reward_parts": dict(zip(labels, of_parts, strict=True))} if labels else {}),
                    }
                    for response, reward, *of_parts in zip(responses, scores.rewards, *values, strict=True)
                ],
            }

    def finish(self, results: Iterable[SetResult]) -> None:
        """Writes the results, a line per set, and the responses, a line per prompt in the order of the sets."""
        lines = ({key: value for key, value in result.record().items() if key != "iteration"} for result in results)
        # A row of a Parquet file may contain values that JSON does not have.
        self._write(RESPONSES, filter(None, self._shown.values()))
        self._write(RESULTS, lines)

    def _write(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        write_file(self._directory / name, "".join(json.dumps(line, default=str) + "\n" for line in lines))
