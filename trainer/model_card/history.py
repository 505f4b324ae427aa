"""What the records of a run say, as sections of its model card: curves, evaluations, the on-policy proof."""

import math
from collections.abc import Sequence
from statistics import fmean

from trainer.model_card.markdown import NOTHING, code, figure, table
from trainer.model_card.records import Line, RunRecords, number

MAX_ROWS = 10
"""Of the table of curves."""

CURVES = {
    "reward": "reward_mean",
    "accuracy": "accuracy",
    "response tokens": "response_tokens_mean",
    "gradient norm": "grad_norm",
    "log-prob gap (RMS)": "logprob_gap_rms",
}
"""Column -> figure of `metrics.jsonl`."""


def curves(records: RunRecords) -> str:
    """Means over equal ranges of the iterations; figures that no record has are left out."""
    lines = records.metrics
    if not lines:
        return "The run's directory has no readable `metrics.jsonl` of these iterations."
    columns = {name: key for name, key in CURVES.items() if any(number(line, key) is not None for line in lines)}
    size = math.ceil(len(lines) / MAX_ROWS)
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    rows = [[_range(part), *(figure(_mean(part, key)) for key in columns.values())] for part in parts]
    return "Means over iterations, counted from 0.\n\n" + table(["iterations", *columns], rows)


def _range(lines: Sequence[Line]) -> str:
    first, last = lines[0]["iteration"], lines[-1]["iteration"]
    return str(first) if first == last else f"{first}–{last}"


def _mean(lines: Sequence[Line], key: str) -> float | None:
    values = [value for line in lines if (value := number(line, key)) is not None]
    return fmean(values) if values else None


def evaluations(records: RunRecords) -> str:
    """The first and the last complete evaluation of each set, and whether the last is of the exported weights."""
    by_set: dict[str, list[Line]] = {}
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


def _evaluation_row(name: str, line: Line) -> list[str]:
    samples = line.get("num_samples")
    average = f"avg@{samples}" if number(line, f"avg@{samples}") is not None else "pass@1"
    correct = _with_interval(line, average)
    return [
        code(name),
        str(line["iteration"]),
        figure(number(line, "num_prompts")),
        *(figure(number(line, key)) for key in ("temperature", "top_p", "top_k")),
        correct if correct == NOTHING else f"{average} {correct}",
        _with_interval(line, "reward_mean"),
    ]


def _with_interval(line: Line, key: str) -> str:
    intervals = line.get("intervals")
    ends = intervals.get(key) if isinstance(intervals, dict) else None
    shown = figure(number(line, key))
    if isinstance(ends, list) and len(ends) == 2:
        low, high = (figure(number({"end": end}, "end")) for end in ends)
        return f"{shown} [{low}, {high}]"
    return shown


def proof(records: RunRecords) -> str:
    """How many iterations have a proof in the ledger, and over what."""
    if not records.ledger:
        return "The run's directory has no readable `ledger.jsonl` of these iterations, so nothing is claimed."
    failed = {line["iteration"] for line in records.ledger if line.get("on_policy") is not True}
    proven = {line["iteration"] for line in records.ledger} - failed
    lines = [line for line in records.ledger if line["iteration"] in proven]
    missing = records.iteration - len(proven) - len(failed)
    gaps = [gap for line in lines if (gap := number(line, "max_logprob_gap")) is not None]
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


def _sum(lines: Sequence[Line], key: str) -> int:
    return int(sum(number(line, key) or 0 for line in lines))


def _num_unjudged(lines: Sequence[Line]) -> int:
    gaps = [(line["iteration"], line.get("logprob_gaps")) for line in lines]
    return len({iteration for iteration, each in gaps if isinstance(each, dict) and each.get("unjudged")})
