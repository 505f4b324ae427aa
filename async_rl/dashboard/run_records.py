"""The records of one run directory, followed while the run writes them; `page` answers from it.

Of `metrics.jsonl`, `ledger.jsonl` and `evaluations.jsonl`, a few hundred bytes per iteration are kept in memory; of
`timeline.jsonl` and `samples.jsonl`, which may have hundreds of megabytes, only where the rows of each iteration are.
"""

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.dashboard.followed_file import FollowedFile, FollowedRotation, has_iteration, iteration_of
from async_rl.dashboard.record_table import DETAILS, RecordTable
from async_rl.dashboard.run_about import about_run
from async_rl.errors import ConfigError
from async_rl.tracking.natural_order import natural_order
from async_rl.tracking.record_lines import number_of, record_of, require_readable
from async_rl.tracking.records import ROTATED
from async_rl.tracking.samples import SAMPLES
from async_rl.tracking.timeline import TIMELINE

MAX_VIOLATIONS_SHOWN = 20

MAX_DEPTH = 8
"""Of lists and tables in a row of samples; those of `tracking.samples` have four."""

FOLLOWED = ("metrics.jsonl", "ledger.jsonl", "evaluations.jsonl")

PROOF_FIELDS = (
    "iteration",
    "weight_version",
    "fingerprint",
    "on_policy",
    "num_groups",
    "num_responses",
    "num_response_tokens",
    "num_continued",
    "num_resampled",
    "max_logprob_gap",
    "samples",
    "num_violations",
)

GROUP_FIELDS = (
    "index",
    "prompt_id",
    "is_trained",
    "num_responses",
    "num_response_tokens",
    "reward_mean",
    "attempts",
    "num_continued",
    "num_truncated",
    "started_s",
    "finished_s",
    "train_started_s",
    "train_finished_s",
)


@dataclass(frozen=True, slots=True)
class State:
    """How many entries a run's records have; with another `generation`, earlier ones were replaced."""

    generation: int
    num_records: int
    num_proofs: int
    num_evaluations: int


@dataclass(frozen=True, slots=True)
class SampleKey:
    """What a row of samples can be chosen by, without reading it."""

    iteration: int
    index: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which rows of samples are wanted: of one iteration, with a reward in the range, with a text in any field."""

    iteration: int | None = None
    lowest: float = -math.inf
    highest: float = math.inf
    text: str = ""

    def may_have(self, key: SampleKey) -> bool:
        if self.iteration is not None and key.iteration != self.iteration:
            return False
        is_open = math.isinf(self.lowest) and math.isinf(self.highest)
        return is_open or any(self.lowest <= reward <= self.highest for reward in key.rewards)

    def has_text(self, row: Mapping[str, Any]) -> bool:
        return not self.text or self.text.casefold() in " ".join(_texts(row)).casefold()


class RunRecords:
    """The records of the run in `run_dir`, which may have none yet; its methods may be called from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._files = [FollowedFile(run_dir / name) for name in FOLLOWED]
        self._generation = 0
        self._table = RecordTable()
        self._proofs: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._num_iterations: int | None = None
        self._timeline = FollowedRotation(TIMELINE, run_dir, iteration_of)
        self._samples = FollowedRotation(SAMPLES, run_dir, _sample_key)

    def follow(self) -> State:
        """Reads what is new."""
        with self._lock:
            # Of every file, also after one that has changed.
            unchanged = [file.is_unchanged() for file in self._files]
            if not all(unchanged):
                self._read_new()
            return self._state()

    def records(self, generation: int, num_records: int, num_proofs: int) -> dict[str, Any]:
        """What a page lacks that has these numbers of entries, as JSON; all, if it has another generation."""
        self.follow()
        with self._lock:
            if generation != self._generation:
                num_records = num_proofs = 0
            return {
                "generation": self._generation,
                "num_iterations": self._num_iterations,
                "metrics": self._table.since(num_records),
                "proofs": {"first": num_proofs, "rows": self._proofs[num_proofs:]},
                "evaluations": list(self._evaluations),
            }

    def about(self) -> dict[str, Any]:
        """What the run is and how it stands, see `about_run`."""
        with self._lock:
            iterations = self._table.iterations
            return about_run(self.run_dir, iterations[-1] + 1 if iterations else 0, self._num_iterations)

    def period(self, iteration: int) -> dict[str, Any]:
        """The groups of an iteration, and when its parts were, in seconds since its start."""
        with self._lock:
            self._timeline.follow()
            record = self._table.row(iteration)
            spans = [span for span in self._timeline.spans() if span.key == iteration]
        times = {name: record.get(name) for name in ("seconds", "publish_s", "step_s", "wait_s", "train_s", *DETAILS)}
        rows = (row for span in spans for row in span.rows())
        return {"iteration": iteration, **times, "groups": [_group(row) for row in rows]}

    def periods(self) -> list[int]:
        """The iterations whose groups are kept, ascending."""
        with self._lock:
            self._timeline.follow()
            return sorted({span.key for span in self._timeline.spans()})

    def samples(self, wanted: SampleFilter, skip: int, limit: int) -> dict[str, Any]:
        """The rows that are wanted, newest iteration first, after `skip` others, at most `limit`."""
        with self._lock:
            self._samples.follow()
            spans = [span for span in self._samples.spans() if wanted.may_have(span.key)]
        spans.sort(key=lambda span: (-span.key.iteration, span.key.index))
        found = [span for span in spans if any(map(wanted.has_text, span.rows()))] if wanted.text else spans
        return {
            "total": len(found),
            "rows": [_sample(row) for span in found[skip : skip + limit] for row in span.rows()],
        }

    def all_samples(self) -> Iterator[dict[str, Any]]:
        """Every kept row, oldest first."""
        with self._lock:
            self._samples.follow()
            spans = list(self._samples.spans())
        for span in spans:
            yield from map(_sample, span.rows())

    def _state(self) -> State:
        return State(self._generation, len(self._table.iterations), len(self._proofs), len(self._evaluations))

    def _read_new(self) -> None:
        # A resumed run cuts all three files: what was read of any of them is given up together.
        restarted = [file.has_restarted() for file in self._files]
        if any(restarted):
            self._generation += 1
            for file in self._files:
                file.restart()
            self._table.clear()
            self._proofs.clear()
            self._evaluations.clear()
        metrics, ledger, evaluations = (_records(file.new_lines()) for file in self._files)
        for record in metrics:
            if not self._table.add(record):
                self._generation += 1
            total = record.get("iterations")
            self._num_iterations = total if isinstance(total, int) else self._num_iterations
        self._proofs += map(_proof, ledger)
        self._evaluations += map(_evaluation, evaluations)


def open_run(run_dir: Path) -> RunRecords:
    """The records of a directory that a user names.

    Raises:
        ConfigError: it is not the directory of a run, or its records may not be read.
    """
    names = (*FOLLOWED, *(kind.name for kind in ROTATED), "launch.json")
    require_readable(run_dir, names)
    if not any((run_dir / name).exists() for name in names):
        raise ConfigError(f"{str(run_dir)!r} has no records of a run: name a run.dir, which has metrics.jsonl")
    return RunRecords(run_dir)


def names_of(runs: Sequence[RunRecords]) -> list[str]:
    """What runs are called beside each other: their directories' names, after as many parents as tell them apart."""
    parts = [run.run_dir.resolve().parts for run in runs]
    names = []
    for number, own in enumerate(parts):
        others = [other for other in parts if other != own]
        depth = 1
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        # A name on a disk need not be text.
        name = os.fsencode("/".join(own[-depth:])).decode(errors="replace")
        num_before = parts[:number].count(own)
        names.append(f"{name} ({num_before + 1})" if num_before else name)
    return names


def as_json(value: Any) -> str:
    """JSON as browsers read it: without NaN and infinities, which the records do not have either."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _records(lines: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
    """The records with an iteration; lines that are none are left out."""
    for _, line in lines:
        record = record_of(line)
        if record is not None and has_iteration(record):
            yield record


def _proof(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a line of the ledger."""
    gaps = record.get("logprob_gaps")
    gaps = gaps if isinstance(gaps, dict) else {}
    instances = gaps.get("instances")
    violations = record.get("violations")
    return {
        **{name: _plain(record.get(name)) for name in PROOF_FIELDS},
        "rms": number_of(gaps.get("rms")),
        "largest_rms": number_of(gaps.get("largest_rms")),
        "unjudged": _plain(gaps.get("unjudged")),
        "instances": {
            str(url): [number_of(own.get("tokens")), number_of(own.get("rms"))]
            for url, own in (instances.items() if isinstance(instances, dict) else ())
            if isinstance(own, dict)
        },
        "violations": list(map(str, violations[:MAX_VIOLATIONS_SHOWN])) if isinstance(violations, list) else [],
    }


def _evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in record.items()}


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a group; `instances` are those that sampled it."""
    gaps = row.get("logprob_gaps")
    shown = {name: _plain(row[name]) for name in GROUP_FIELDS if name in row}
    return {**shown, "instances": sorted(map(str, gaps), key=natural_order) if isinstance(gaps, dict) else []}


def _plain(value: Any) -> str | float | bool | None:
    """A text, a finite number, or a truth value; None for anything else."""
    return value if isinstance(value, str | bool) else number_of(value)


def _finite(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The value with None for numbers that are not finite, and for what lies deeper than any record does."""
    if isinstance(value, list | dict) and depth == 0:
        return None
    if isinstance(value, list):
        return [_finite(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return {name: _finite(each, depth - 1) for name, each in value.items()}
    return _plain(value)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of samples with responses whose rewards are numbers or None."""
    shown: dict[str, Any] = _finite(row)
    return {**shown, "responses": list(map(_response, responses_of(shown)))}


def _response(response: Mapping[str, Any]) -> dict[str, Any]:
    parts = response.get("reward_parts")
    shown = {**response, "reward": number_of(response.get("reward"))}
    if isinstance(parts, dict):
        return {**shown, "reward_parts": {name: number_of(value) for name, value in parts.items()}}
    return {name: value for name, value in shown.items() if name != "reward_parts"}


def _sample_key(line: bytes) -> SampleKey | None:
    row = record_of(line)
    if row is None or not has_iteration(row):
        return None
    rewards = [response.get("reward") for response in responses_of(row)]
    index = row.get("index")
    return SampleKey(
        row["iteration"],
        index if isinstance(index, int) else 0,
        tuple(reward for value in rewards if (reward := number_of(value)) is not None),
    )


def responses_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The responses of a row of samples."""
    responses = row.get("responses")
    return [each for each in responses if isinstance(each, dict)] if isinstance(responses, list) else []


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a sample: its prompt, its row and its responses."""
    yield str(row.get("prompt", ""))
    of_row = row.get("row")
    yield from map(str, of_row.values() if isinstance(of_row, dict) else ())
    yield from (str(response.get("text", "")) for response in responses_of(row))
