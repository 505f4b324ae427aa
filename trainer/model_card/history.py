"""What the records of a run say, as sections of its model card: curves, evaluations, the on-policy proof.

Records may be missing, or damaged: what is not there is left out, and what cannot be read is counted, so that an export
never fails because of its card.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from async_rl.records.run_records import Record, RecordFile, RunRecords, has_iteration, number_of, record_of
from trainer.model_card.markdown import NOTHING, code, figure, table

MAX_ROWS = 10
"""Of the table of curves."""

CURVES = {
    "reward": "reward_mean",
    "accuracy": "accuracy",
    "response tokens": "response_tokens_mean",
    "gradient norm": "grad_norm",
    "log-prob gap (RMS)": "logprob_gap_rms",
    "values changed by adapters": "merged_share",
}
"""Column -> figure of `metrics.jsonl`."""


class History:
    """The records of the iterations before `iteration`, the one that is trained next, in the order of iterations.

    Evaluations are those of weights that these iterations made; those of `iteration` are of the exported weights.
    `unreadable` has the number of lines, by file, that are no records.
    """

    def __init__(self, run_dir: Path, iteration: int) -> None:
        run = RunRecords(run_dir)
        self.iteration = iteration
        self.unreadable: dict[str, int] = {}
        self.metrics = self._read(run.metrics, iteration - 1)
        self.ledger = self._read(run.ledger, iteration - 1)
        self.evaluations = self._read(run.evaluations, iteration)

    def _read(self, file: RecordFile, last: int) -> list[Record]:
        found = [record_of(line) for _, line in file.new_lines()]
        records = [record for record in found if record is not None and has_iteration(record)]
        if len(records) < len(found):
            self.unreadable[file.path.name] = len(found) - len(records)
        return sorted((r for r in records if 0 <= r["iteration"] <= last), key=lambda record: int(record["iteration"]))


def curves(records: History) -> str:
    """Means over equal ranges of the iterations; figures that no record has are left out."""
    lines = records.metrics
    if not lines:
        return "The run's directory has no readable `metrics.jsonl` of these iterations."
    columns = {name: key for name, key in CURVES.items() if any(number_of(line.get(key)) is not None for line in lines)}
    size = math.ceil(len(lines) / MAX_ROWS)
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    rows = [[_range(part), *(figure(_mean(part, key)) for key in columns.values())] for part in parts]
    return "Means over iterations, counted from 0.\n\n" + table(["iterations", *columns], rows)


def _range(lines: Sequence[Record]) -> str:
    first, last = lines[0]["iteration"], lines[-1]["iteration"]
    return str(first) if first == last else f"{first}–{last}"


def _mean(lines: Sequence[Record], key: str) -> float | None:
    values = [value for line in lines if (value := number_of(line.get(key))) is not None]
    return fmean(values) if values else None


def evaluations(records: History) -> str:
    """The first and the last complete evaluation of each set, and whether the last is of the exported weights."""
    by_set: dict[str, list[Record]] = {}
    for line in records.evaluations:
        if line.get("complete") is True:
            by_set.setdefault(str(line.get("set")), []).append(line)
    if not by_set:
        return "The records have no complete evaluation of these weights or of earlier ones."
    rows = []
    for name, lines in sorted(by_set.items()):
        rows += [_evaluation_row(name, line) for line in (lines[:1] + lines[-1:] if len(lines) > 1 else lines)]
    last = max(lines[-1]["iteration"] for lines in by_set.values())
    which = (
        f"The exported weights were evaluated: the rows after {last} iterations."
        if last == records.iteration
        else f"The exported weights were not evaluated; the last evaluation is of those after {last} iterations."
    )
    header = ["set", "after iterations", "prompts", "temperature", "top-p", "top-k", "correct", "reward"]
    note = "In brackets are 95% confidence intervals over prompts, where the records have them."
    return f"{which} {note}\n\n{table(header, rows)}"


def _evaluation_row(name: str, line: Record) -> list[str]:
    samples = line.get("num_samples")
    average = f"avg@{samples}" if number_of(line.get(f"avg@{samples}")) is not None else "pass@1"
    correct = _with_interval(line, average)
    return [
        code(name),
        str(line["iteration"]),
        figure(number_of(line.get("num_prompts"))),
        *(figure(number_of(line.get(key))) for key in ("temperature", "top_p", "top_k")),
        correct if correct == NOTHING else f"{average} {correct}",
        _with_interval(line, "reward_mean"),
    ]


def _with_interval(line: Record, key: str) -> str:
    intervals = line.get("intervals")
    ends = intervals.get(key) if isinstance(intervals, dict) else None
    shown = figure(number_of(line.get(key)))
    if isinstance(ends, list) and len(ends) == 2:
        low, high = (figure(number_of(end)) for end in ends)
        return f"{shown} [{low}, {high}]"
    return shown


def proof(records: History) -> str:
    """How many iterations have a proof in the ledger, and over what."""
    if not records.ledger:
        return "The run's directory has no readable `ledger.jsonl` of these iterations, so nothing is claimed."
    failed = {line["iteration"] for line in records.ledger if line.get("on_policy") is not True}
    proven = {line["iteration"] for line in records.ledger} - failed
    lines = [line for line in records.ledger if line["iteration"] in proven]
    missing = records.iteration - len(proven) - len(failed)
    gaps = [gap for line in lines if (gap := number_of(line.get("max_logprob_gap"))) is not None]
    rows = [
        ["iterations of these weights", str(records.iteration)],
        ["proven on-policy and complete", str(len(proven))],
        ["without a line in the ledger", str(missing)],
        ["failed", str(len(failed))],
        ["responses", f"{_sum(lines, 'num_responses'):,}"],
        ["sampled tokens", f"{_sum(lines, 'num_response_tokens'):,}"],
        ["largest difference of a token's log-prob, trainer - instance, in nats", figure(max(gaps, default=None))],
        ["iterations with too few tokens to judge these differences", str(_num_unjudged(lines))],
    ]
    return (
        "A proof says that every trained token was sampled from the weights of its iteration, and that every prompt of "
        "the batch, with dynamic sampling every selected one, was trained exactly once; it was made before each "
        "optimizer step.\n\n"
    ) + table(["`ledger.jsonl`", ""], rows)


def _sum(lines: Sequence[Record], key: str) -> int:
    return int(sum(number_of(line.get(key)) or 0 for line in lines))


def _num_unjudged(lines: Sequence[Record]) -> int:
    gaps = [(line["iteration"], line.get("logprob_gaps")) for line in lines]
    return len({iteration for iteration, each in gaps if isinstance(each, dict) and each.get("unjudged")})
