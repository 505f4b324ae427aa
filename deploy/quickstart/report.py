"""The quickstart's `report.html`: one self-contained page, readable offline."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from async_rl.tracking.timeline import GroupTimes
from deploy.cluster.run_view import Record
from deploy.quickstart.charts import BLUE, ORANGE, Span, curve, timeline
from deploy.quickstart.kind import Kind

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>async-rl quickstart</title>
<style>
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 800px; margin: 2.5rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.4rem; }
p { margin: 0.4rem 0 0.8rem; } svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; font-size: 0.93rem; }
td, th { text-align: left; padding: 0.28rem 0.7rem 0.28rem 0; border-bottom: 1px solid #e5e7eb; font-weight: normal; }
th { color: #6b7280; } code { font-size: 0.92em; } .right { color: #15803d; } .wrong { color: #b91c1c; }
.rollout { color: $blue; font-weight: 600; } .training { color: $orange; font-weight: 600; }
</style>
</head>
<body>
<h1>async-rl quickstart</h1>
<p>$headline</p>
$sections
</body>
</html>
""")


def render(
    kind: Kind,
    summary: Mapping[str, Any],
    metrics: Sequence[Record],
    times_of: Callable[[Record], Sequence[GroupTimes]],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> str:
    """The page of at least one iteration.

    Args:
        kind: the quickstart.
        summary: the result of `summarize`.
        metrics: the records of `metrics.jsonl`.
        times_of: when the groups of a record's iteration were rolled out and trained (see `group_times`).
        before: the record of `evaluate` for the base model.
        after: the same for the trained model.
    """
    sections = [
        ("Summary", _summary_table(summary)),
        ("Accuracy", _accuracy(kind, summary, metrics)),
        ("Reward", curve([record["reward_mean"] for record in metrics], "mean reward by iteration", BLUE, {})),
        ("One period", _one_period(metrics, times_of)),
        ("On-policy proof", _proof(summary)),
        (f"Held-out {kind.questions}, before and after", _samples(before, after)),
    ]
    return PAGE.substitute(
        blue=BLUE,
        orange=ORANGE,
        headline=_headline(kind, summary),
        sections="\n".join(f"<h2>{title}</h2>\n{body}" for title, body in sections),
    )


def _headline(kind: Kind, summary: Mapping[str, Any]) -> str:
    return (
        f"{kind.summary} Of {summary['num_held_out']} {kind.questions} it never trained on, it solved "
        f"<b>{summary['accuracy_before']:.0%}</b> "
        f"after its supervised warm start, and <b>{summary['accuracy_after']:.0%}</b> after {summary['iterations']} "
        "iterations of strictly on-policy training, with inference and training running at the same time."
    )


def _summary_table(summary: Mapping[str, Any]) -> str:
    split = summary["device_split"]
    cores = ", ".join(f"{name} on {_cores(own)}" for name, own in split["cores"].items())
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases_s"].items())
    shares = ", ".join(f"{name} {share:.0%}" for name, share in split.items() if name != "cores")
    rows = {
        "seed": str(summary["seed"]),
        "iterations": f"{summary['iterations']}, {summary['num_responses']} responses",
        "time": f"{summary['seconds']:.0f} s: {phases}",
        "held-out accuracy": f"{summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}",
        "mean reward": f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}",
        "throughput": f"{summary['tokens_per_s']:.0f} tokens/s",
        "the trainer's time": shares,
        "cores": cores,
    }
    return _table([(escape(name), escape(value)) for name, value in rows.items()])


def _cores(own: Sequence[int]) -> str:
    return "any core" if not own else ("core " if len(own) == 1 else "cores ") + ", ".join(map(str, own))


def _accuracy(kind: Kind, summary: Mapping[str, Any], metrics: Sequence[Record]) -> str:
    marks = {
        f"held-out, before: {summary['accuracy_before']:.2f}": (0.0, summary["accuracy_before"]),
        f"held-out, after: {summary['accuracy_after']:.2f}": (len(metrics) - 1.0, summary["accuracy_after"]),
    }
    chart = curve([record["accuracy"] for record in metrics], "accuracy by iteration", BLUE, marks)
    return f"<p>Share of sampled responses that are exactly right, on each iteration's own {kind.questions}.</p>{chart}"


def _one_period(metrics: Sequence[Record], times_of: Callable[[Record], Sequence[GroupTimes]]) -> str:
    record = _typical(metrics)
    rows: list[tuple[str, Span, Span]] = [
        (f"group {t.index}", (t.started_s, t.finished_s), (t.train_started_s, t.train_finished_s))
        for t in sorted(times_of(record), key=lambda times: times.train_started_s)
    ]
    chart = timeline(rows, record["publish_s"], record["seconds"], "rollouts and training of one iteration")
    return (
        f"<p>Iteration {record['iteration']}, {record['seconds']:.2f} s. One row per group: its "
        '<span class="rollout">rollout</span> from dispatch to its last response, then its '
        '<span class="training">training</span>, which starts while other groups are still being generated. Grey: '
        f"publishing the weights. The step comes last, when every group has been trained.</p>{chart}"
    )


def _typical(metrics: Sequence[Record]) -> Record:
    """The iteration of median length among the last half, after irregularities at the start."""
    late = sorted(metrics[len(metrics) // 2 :], key=lambda record: record["seconds"])
    return late[len(late) // 2]


def _proof(summary: Mapping[str, Any]) -> str:
    verdict = '<span class="right">holds</span>' if summary["on_policy"] else '<span class="wrong">does not hold</span>'
    return (
        f"<p>The proof {verdict} for {summary['iterations']} iterations: every response of a batch was sampled from "
        "the weight version that its iteration trained, and every prompt contributed exactly its responses, once. The "
        "largest difference between a token's log-probability at the trainer and at the instance that sampled it was "
        f"{summary['max_logprob_gap']:.1e} nats. <code>ledger.jsonl</code> has a row per optimizer step.</p>"
    )


def _samples(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    head = ("question", "before", "after")
    rows = [
        (escape(first["question"]), _response(first), _response(last))
        for first, last in zip(before["samples"], after["samples"], strict=True)
    ]
    return _table([tuple(f"<b>{name}</b>" for name in head), *rows])


def _response(sample: Mapping[str, Any]) -> str:
    text = "(did not end)" if sample["response"] is None else sample["response"]
    kind, sign = ("right", "✓") if sample["correct"] else ("wrong", "✗")
    return f'<span class="{kind}">{sign} {escape(text)}</span>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table with its first column as headings."""
    lines = [f"<tr><th>{row[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in row[1:]) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
