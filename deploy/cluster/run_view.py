"""Shows a run's progress: follows its records into plain lines; `live_view.py` is the view of a terminal."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from async_rl.records.balance import IterationTimes, advise
from async_rl.records.run_records import RecordFile, RunRecords, describe_evaluation
from async_rl.shared.programs.error_text import one_line

Record = Mapping[str, Any]
"""The numbers of a line of `metrics.jsonl`, as `shown_records` gives them; `docs/metrics.md` has their names."""

_NEEDED = ("seconds", "wait_s", "train_s", "publish_s", "step_s", "rollout_s")
_NEEDED_COUNTS = ("iteration", "iterations", "num_groups", "num_instances")

_MAX_VALUE = 1e300
"""Sums of larger numbers may be infinite."""

_MAX_S = 1e9

_LEAVING_S = 0.05
_LEAST_SHARE = 0.005
"""What is less is none: leaving a batch takes milliseconds without an evaluation, as does a canary that is not
due."""

NUM_RECENT = 10
PLAIN_EVERY = 10
EVERY_VARIABLE = "ASYNC_RL_PROGRESS_EVERY"
"""Of the environment: another number, for a starter that shows each of them."""

SILENT_S = 30.0
"""Without a line for so long, a run looks like one that hangs."""


def shown_records(rows: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    """The numbers of each record that has what every view shows; a line may be anything, and views must not end a run.

    A figure that is null, or no number, is left out.
    """
    for row in rows:
        record = {name: value for name, value in row.items() if _is_number(value)}
        has_times = all(abs(record.get(name, math.inf)) <= _MAX_S for name in _NEEDED)
        if has_times and all(isinstance(record.get(name), int) for name in _NEEDED_COUNTS):
            yield record


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_VALUE


class RunView(Protocol):
    """The launcher's view of a run; a context for the duration of the run."""

    def __enter__(self) -> "RunView": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, record: Record) -> None:
        """Shows the record of another iteration."""
        ...

    def note(self, text: str) -> None:
        """Shows a message that is not an iteration, such as the loss of an instance."""
        ...

    def tick(self) -> None:
        """Called several times a second, for a view that says from time to time that the run goes on."""
        ...


class RunFeed:
    """Follows the records of a run and shows what is new in a view: iterations, evaluations, warnings."""

    def __init__(self, run_dir: Path, *, from_start: bool = False) -> None:
        """`from_start`: with what is there already, apart from warnings."""
        self._run = RunRecords(run_dir)
        self._shown: set[tuple[str, ...]] = set()
        if not from_start:
            self._news(self._run.metrics, _OF_ITERATION)
            self._news(self._run.evaluations, _OF_EVALUATION)
        list(self._run.notices.new_records())

    def show_new(self, view: RunView) -> Record | None:
        """Returns the last new record of an iteration."""
        last = None
        for notice in self._run.notices.new_records():
            view.note(f"trainer: {notice.get('text')}")
        for last in shown_records(self._news(self._run.metrics, _OF_ITERATION)):
            view.show(last)
        for evaluation in self._news(self._run.evaluations, _OF_EVALUATION):
            view.note(describe_evaluation(evaluation))
        view.tick()
        return last

    def _news(self, file: RecordFile, names: Sequence[str]) -> list[dict[str, Any]]:
        """The records whose values under `names` none had before: a run that resumes replaces its files."""
        news = []
        for record in file.new_records():
            key = (*names, *(str(record.get(name)) for name in names))
            if key not in self._shown:
                self._shown.add(key)
                news.append(record)
        return news


_OF_ITERATION = ("iteration", "weight_version", "started_unix_s")
_OF_EVALUATION = ("iteration", "set", "weight_version")


class PlainView:
    """A line for the first iteration, for each of `every` and at least every `SILENT_S`, and one of advice at the end:
    for logs and pipes."""

    def __init__(
        self, console: Console, monotonic: Callable[[], float] = time.monotonic, every: int = PLAIN_EVERY
    ) -> None:
        self._console = console
        self._every = every
        self._clock = monotonic
        self._recent: deque[Record] = deque(maxlen=NUM_RECENT)
        self._began_s = self._said_s = self._shown_s = monotonic()

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._recent:
            self.note(balance(self._recent))

    def show(self, record: Record) -> None:
        self._recent.append(record)
        self._shown_s = self._clock()
        done = record["iteration"] + 1
        is_due = self._shown_s - self._said_s >= SILENT_S
        if done == 1 or done % self._every == 0 or done == record["iterations"] or is_due:
            self.note(f"{progress(record)}  {describe(record)}")

    def tick(self) -> None:
        now = self._clock()
        if now - self._said_s < SILENT_S:
            return
        if not self._recent:
            self.note(f"waiting for the first iteration, {clock(now - self._began_s)} so far")
            return
        last = self._recent[-1]
        what = "the end" if last["iteration"] + 1 >= last["iterations"] else f"iteration {last['iteration'] + 1}"
        self.note(f"{progress(last)}  waiting for {what}, {clock(now - self._shown_s)} so far")

    def note(self, text: str) -> None:
        self._said_s = self._clock()
        encoding = self._console.encoding
        shown = text.encode(encoding, "replace").decode(encoding)
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)


def progress(record: Record) -> str:
    """The number of an iteration, from 0 as in all records, and how many of the run are done."""
    return f"iteration {record['iteration']}, {record['iteration'] + 1}/{record['iterations']} done"


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(int(min(max(0.0, seconds), _MAX_S)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe(record: Record) -> str:
    """The metrics of one iteration in a line."""
    shares = "  ".join(f"{name} {share:.0%}" for name, share in time_shares([record]).items())
    skipped = "NO STEP TAKEN (gradient not finite)  " if record.get("skipped_steps") else ""
    untrained = f"no gradient {share:.0%}  " if (share := record.get("untrained_groups")) else ""
    accuracy = f"accuracy {record['accuracy']:.3f}  " if "accuracy" in record else ""
    turns = f"turns {record['turns_mean']:.1f}  " if "turns_mean" in record else ""
    # Of the publish before it: what adapters add may be rounded away.
    kept = f"adapters kept {record['merged_share']:.1%}  " if "merged_share" in record else ""
    reward, length, speed = (
        format(record[name], form) if name in record else "-"
        for name, form in (("reward_mean", ".3f"), ("response_tokens_mean", ".1f"), ("tokens_per_s", ".0f"))
    )
    return (
        f"{skipped}reward {reward}  {accuracy}{untrained}response {length} tokens  {turns}{kept}{speed} tokens/s  "
        f"{record['seconds']:.2f} s  ({shares})"
    )


def time_shares(records: Sequence[Record]) -> dict[str, float]:
    """Shares of the trainer's wall time, which add up to 1: waiting, training, publishing, other; and the canary and
    evaluations where they took any."""
    total_s = sum(record["seconds"] for record in records)
    canary_s, evaluation_s = (sum(record.get(name, 0.0) for record in records) for name in ("canary_s", "evaluation_s"))
    least_s = max(_LEAST_SHARE * total_s, _LEAVING_S * len(records))
    beside = {"canary": canary_s, "evaluating": evaluation_s}
    shown = {name: seconds for name, seconds in beside.items() if seconds > least_s}
    spent_s = {
        "waiting": sum(record["wait_s"] for record in records),
        "training": sum(record["train_s"] + record["step_s"] for record in records),
        "publishing": sum(record["publish_s"] for record in records) - shown.get("canary", 0.0),
        **shown,
    }
    shares = {name: seconds / total_s if total_s > 0 else 0.0 for name, seconds in spent_s.items()}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def balance(recent: Iterable[Record]) -> str:
    """The number of instances that would have balanced the pools, in a line."""
    records = list(recent)
    # Null where the pools take turns, and so left out.
    return advise(list(map(IterationTimes.of, records)), records[-1].get("desired_instances"))


def printable(text: str) -> Text:
    """Without control characters: names, causes and reasons are other programs' text."""
    return Text(one_line(text))
