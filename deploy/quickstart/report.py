"""The quickstart's results: `summary.json`, a few figures that can be checked against the files of its run, and
`report.html`, what it measured before and after, above the dashboard's page on the run, where that part is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from async_rl.records.run_records import Record
from async_rl.shared.programs.parts import load_part
from deploy.cluster.run_view import time_shares
from deploy.quickstart.kind import Kind

NUM_ENDS = 5
"""Iterations averaged at either end of the run: one batch's mean reward is noisy."""


def summarize(
    metrics: Sequence[Record],
    ledger: Sequence[Record],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    task: str,
    engine: str,
    seed: int,
    phases_s: Mapping[str, float],
    cores: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    """The summary of a finished run.

    Args:
        metrics: the records of `metrics.jsonl`, one per iteration.
        ledger: the rows of `ledger.jsonl`, one proof per optimizer step.
        before: the record of `evaluate` for the base model.
        after: the same for the trained model.
        task: the quickstart's name.
        engine: what generated, `inference.engine`.
        seed: the run's seed.
        phases_s: wall seconds of each phase of the quickstart, in their order.
        cores: CPU cores each process was pinned to; empty if not pinned.

    Returns:
        Accuracies are shares of held-out prompts; rewards are means over the first and last `NUM_ENDS` iterations;
        `publish_bytes` are of the last publish, and so is `merged_share`, None where no adapters were merged;
        `tokens_per_s` counts prompt and response tokens over the iterations' wall time; `device_split` has the shares
        of that time in which the trainer waited for rollouts, trained and published.
    """
    num_ends = max(1, min(NUM_ENDS, len(metrics) // 2))
    tokens = sum(record["prompt_tokens"] + record["response_tokens"] for record in metrics)
    return {
        "task": task,
        "engine": engine,
        "seed": seed,
        "iterations": len(metrics),
        "seconds": round(sum(phases_s.values()), 1),
        "phases_s": {name: round(seconds, 1) for name, seconds in phases_s.items()},
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "num_held_out": after["num_prompts"],
        "accuracy_gain": round(after["accuracy"] - before["accuracy"], 4),
        "reward_first": round(fmean(record["reward_mean"] for record in metrics[:num_ends]), 4),
        "reward_last": round(fmean(record["reward_mean"] for record in metrics[-num_ends:]), 4),
        "on_policy": is_on_policy(metrics, ledger),
        "max_logprob_gap": max(row["max_logprob_gap"] for row in ledger),
        "num_responses": sum(row["num_responses"] for row in ledger),
        "publish_bytes": metrics[-1]["publish_bytes"],
        "merged_share": metrics[-1].get("merged_share"),
        "tokens_per_s": round(tokens / sum(record["seconds"] for record in metrics), 1),
        "device_split": {
            **{name: round(share, 4) for name, share in time_shares(metrics).items()},
            "cores": {name: list(own) for name, own in cores.items()},
        },
    }


def is_on_policy(metrics: Sequence[Record], ledger: Sequence[Record]) -> bool:
    """Whether every iteration has a proof of each of its steps, each holds, and no weight version was trained on in two
    iterations."""
    num_proofs = Counter((row["iteration"], row["weight_version"]) for row in ledger if row["on_policy"])
    iterations, versions = ({key[place] for key in num_proofs} for place in (0, 1))
    is_complete = iterations == {record["iteration"] for record in metrics} and len(set(num_proofs.values())) == 1
    return is_complete and num_proofs.total() == len(ledger) and len(versions) == len(num_proofs) == len(metrics)


def render(
    kind: Kind, summary: Mapping[str, Any], run_dir: Path, before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """The page.

    Args:
        summary: the result of `summarize`.
        run_dir: of the run, with its records.
        before: the record of `evaluate` for the base model.
        after: the same for the trained model.
    """
    samples = [
        f"<tr><td>{escape(first['question'])}</td><td>{_response(first)}</td><td>{_response(last)}</td></tr>"
        for first, last in zip(before["samples"], after["samples"], strict=True)
    ]
    rows = [f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in summary_rows(summary).items()]
    opening = (
        f'<section aria-label="Quickstart">\n<h2>Quickstart</h2>\n<p>{_headline(kind, summary)}</p>\n'
        f'<div class="card scroll"><table>{"".join(rows)}</table></div>\n'
        f'<div class="card scroll"><h3>Held-out {escape(kind.questions)}, before and after</h3>\n<table>'
        f"<tr><th>question</th><th>before</th><th>after</th></tr>{''.join(samples)}</table></div>\n</section>\n"
    )
    report = load_part("dashboard", "report")
    page: str = report.report([report.open_run(run_dir)], opening)
    return page


def _headline(kind: Kind, summary: Mapping[str, Any]) -> str:
    return (
        f"{kind.summary} Of {summary['num_held_out']} {kind.questions} it never trained on, it solved "
        f"<b>{summary['accuracy_before']:.0%}</b> "
        f"after its supervised warm start, and <b>{summary['accuracy_after']:.0%}</b> after {summary['iterations']} "
        "iterations of strictly on-policy training, with inference and training running at the same time."
    )


def summary_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """The summary in words, for the console and the page."""
    split = summary["device_split"]
    share = summary["merged_share"]
    adapters = {} if share is None else {"adapters": f"changed {share:.1%} of the values that have one"}
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases_s"].items())
    return {
        "held-out accuracy": f"{summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}, "
        f"a gain of {summary['accuracy_gain']:+.3f}",
        "mean reward": f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}",
        "engine": summary["engine"],
        "iterations": f"{summary['iterations']}, {summary['num_responses']} responses",
        "time": f"{summary['seconds']:.0f} s: {phases}",
        "a publish": f"{summary['publish_bytes'] / 1e6:.1f} MB",
        "throughput": f"{summary['tokens_per_s']:.0f} tokens/s",
        "trainer's time": ", ".join(f"{name} {share:.0%}" for name, share in split.items() if name != "cores"),
        **adapters,
        "every update on-policy": f"{'yes' if summary['on_policy'] else 'NO'}, gap {summary['max_logprob_gap']:.1e}",
        "cores": ", ".join(f"{name} on {_cores(own)}" for name, own in split["cores"].items()),
        "seed": str(summary["seed"]),
    }


def _cores(own: Sequence[int]) -> str:
    return "any core" if not own else ("core " if len(own) == 1 else "cores ") + ", ".join(map(str, own))


def _response(sample: Mapping[str, Any]) -> str:
    text = "(did not end)" if sample["response"] is None else sample["response"]
    return f"{'✓' if sample['correct'] else '✗'} {escape(text)}"
