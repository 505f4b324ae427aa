"""What the page shows of one run, followed while the run writes its records; `page` answers from it.

Of `metrics.jsonl`, `ledger.jsonl` and `evaluations.jsonl`, a few hundred bytes per iteration are kept in memory; of
`timeline.jsonl` and `samples.jsonl`, which may have hundreds of megabytes, only where the rows of each iteration are.
The trainer writes `config.json`, the lease says who trains, and a launcher leaves `launch.json`; any may be missing.
"""

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.secrets import masked_text
from async_rl.errors import ConfigError
from async_rl.parts.dashboard.record_table import DETAILS, RecordTable
from async_rl.records.records import CONFIG
from async_rl.records.rotation import SAMPLES, TIMELINE
from async_rl.records.run_records import (
    EVALUATIONS,
    LEDGER,
    METRICS,
    RecordFile,
    RecordIndex,
    RunRecords,
    has_iteration,
    natural_order,
    number_of,
    object_in,
    record_of,
    require_readable,
)
from async_rl.shared.locks.lease import holder_of, read_term

MAX_VIOLATIONS_SHOWN = 20

MAX_DEPTH = 8
"""Of lists and tables in a row of samples; those of `tracking.samples` have four."""

NUM_LOG_LINES = 20
MAX_LOG_BYTES = 16_384
MAX_CAUSE_CHARACTERS = 4000

PERIOD_FIGURES = ("seconds", "publish_s", "merged_share", "step_s", "wait_s", "train_s", *DETAILS)
"""Of an iteration's record, those that are shown beside its groups."""

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


class RunData:
    """The records of the run in `run_dir`, which may have none yet; its methods may be called from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._files = RunRecords(run_dir)
        self._samples = RecordIndex(SAMPLES, run_dir, _sample_key)
        self._generation = 0
        self._table = RecordTable()
        self._proofs: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._num_iterations: int | None = None

    def follow(self) -> State:
        """Reads what is new."""
        with self._lock:
            self._read_new()
            return State(self._generation, len(self._table.iterations), len(self._proofs), len(self._evaluations))

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
            record = self._table.row(iteration)
            spans = [span for span in self._files.timeline.spans() if span.key == iteration]
        figures = {name: record.get(name) for name in PERIOD_FIGURES}
        rows = (row for span in spans for row in span.rows())
        return {"iteration": iteration, **figures, "groups": [_group(row) for row in rows]}

    def periods(self) -> list[int]:
        """The iterations whose groups are kept, ascending."""
        with self._lock:
            return sorted({span.key for span in self._files.timeline.spans()})

    def samples(self, wanted: SampleFilter, skip: int, limit: int) -> dict[str, Any]:
        """The rows that are wanted, newest iteration first, after `skip` others, at most `limit`."""
        with self._lock:
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
            spans = self._samples.spans()
        for span in spans:
            yield from map(_sample, span.rows())

    def _read_new(self) -> None:
        # A resumed run cuts all three files: pages get all anew.
        for record in self._new(self._files.metrics, self._table):
            if not self._table.add(record):
                self._generation += 1
            total = record.get("iterations")
            self._num_iterations = total if isinstance(total, int) else self._num_iterations
        self._proofs += map(_proof, self._new(self._files.ledger, self._proofs))
        self._evaluations += map(_evaluation, self._new(self._files.evaluations, self._evaluations))

    def _new(self, file: RecordFile, kept: RecordTable | list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The new records that have an iteration; gives up those that are kept if the file has restarted."""
        records = file.new_records()
        if file.has_restarted:
            self._generation += 1
            kept.clear()
        return filter(has_iteration, records)


def open_run(run_dir: Path) -> RunData:
    """The records of a directory that a user names.

    Raises:
        ConfigError: it is not the directory of a run, or its records may not be read.
    """
    names = (METRICS, LEDGER, EVALUATIONS, TIMELINE.name, SAMPLES.name, "launch.json")
    require_readable(run_dir, names)
    if not any((run_dir / name).exists() for name in names):
        raise ConfigError(f"{str(run_dir)!r} has no records of a run: name a run.dir, which has metrics.jsonl")
    return RunData(run_dir)


def names_of(runs: Sequence[RunData]) -> list[str]:
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
    responses = row.get("responses")
    return [each for each in responses if isinstance(each, dict)] if isinstance(responses, list) else []


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a sample: its prompt, its row and its responses."""
    yield str(row.get("prompt", ""))
    of_row = row.get("row")
    yield from map(str, of_row.values() if isinstance(of_row, dict) else ())
    yield from (str(response.get("text", "")) for response in responses_of(row))


def about_run(run_dir: Path, num_trained: int, num_iterations: int | None) -> dict[str, Any]:
    """`state` in words; `cause` of a failure and the last lines of the trainer's `log`; `settings`: dotted key -> value
    as JSON."""
    trainer = _trainer_of(object_in(run_dir / "launch.json"))
    state = _state(run_dir, num_trained, num_iterations, has_failed=trainer.get("state") == "failed")
    has_failed = state.startswith("failed")
    cause = str(trainer.get("cause") or "") if has_failed else ""
    log = run_dir / "logs" / Path(str(trainer.get("log") or "trainer.log")).name
    return {
        "state": state,
        "cause": masked_text(cause[:MAX_CAUSE_CHARACTERS]) or None,
        "log": _last_lines(log) if has_failed else [],
        "settings": dict(_flat(object_in(run_dir / CONFIG))),
    }


def _state(run_dir: Path, num_trained: int, num_iterations: int | None, *, has_failed: bool) -> str:
    term = read_term(run_dir)
    total = "" if num_iterations is None else f" of {num_iterations}"
    if holder_of(run_dir):
        return "running"
    if num_iterations is not None and num_trained >= num_iterations:
        return "finished"
    if has_failed:
        return f"failed after {num_trained}{total} iterations"
    if term is None:
        return f"{num_trained}{total} iterations are trained"
    how = "stopped" if term.released else "died"
    return f"{how} after {num_trained}{total} iterations"


def _trainer_of(launch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The launcher's record of the task that trains; of several the one that failed."""
    tasks = launch.get("tasks")
    known = [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []
    trainers = [task for task in known if task.get("role") == "trainer"]
    return next((task for task in trainers if task.get("state") == "failed"), trainers[0] if trainers else {})


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, settings in config.items():
        if isinstance(settings, dict):
            yield from ((f"{section}.{key}", json.dumps(value)) for key, value in settings.items())


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return masked_text(text).splitlines()[-NUM_LOG_LINES:]
