"""The quickstart's `report.html`: what it measured before and after, above the dashboard's page on its run."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from async_rl.dashboard.report import report
from async_rl.dashboard.run_records import open_run
from deploy.quickstart.kind import Kind


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
    rows = [f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _rows(summary).items()]
    opening = (
        f'<section aria-label="Quickstart">\n<h2>Quickstart</h2>\n<p>{_headline(kind, summary)}</p>\n'
        f'<div class="card scroll"><table>{"".join(rows)}</table></div>\n'
        f'<div class="card scroll"><h3>Held-out {escape(kind.questions)}, before and after</h3>\n<table>'
        f"<tr><th>question</th><th>before</th><th>after</th></tr>{''.join(samples)}</table></div>\n</section>\n"
    )
    return report([open_run(run_dir)], opening)


def _headline(kind: Kind, summary: Mapping[str, Any]) -> str:
    return (
        f"{kind.summary} Of {summary['num_held_out']} {kind.questions} it never trained on, it solved "
        f"<b>{summary['accuracy_before']:.0%}</b> "
        f"after its supervised warm start, and <b>{summary['accuracy_after']:.0%}</b> after {summary['iterations']} "
        "iterations of strictly on-policy training, with inference and training running at the same time."
    )


def _rows(summary: Mapping[str, Any]) -> dict[str, str]:
    split = summary["device_split"]
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases_s"].items())
    return {
        "seed": str(summary["seed"]),
        "iterations": f"{summary['iterations']}, {summary['num_responses']} responses",
        "time": f"{summary['seconds']:.0f} s: {phases}",
        "held-out accuracy": f"{summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}",
        "mean reward": f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}",
        "throughput": f"{summary['tokens_per_s']:.0f} tokens/s",
        "the trainer's time": ", ".join(f"{name} {share:.0%}" for name, share in split.items() if name != "cores"),
        "cores": ", ".join(f"{name} on {_cores(own)}" for name, own in split["cores"].items()),
        "every update on-policy": f"{'yes' if summary['on_policy'] else 'NO'}, gap {summary['max_logprob_gap']:.1e}",
    }


def _cores(own: Sequence[int]) -> str:
    return "any core" if not own else ("core " if len(own) == 1 else "cores ") + ", ".join(map(str, own))


def _response(sample: Mapping[str, Any]) -> str:
    text = "(did not end)" if sample["response"] is None else sample["response"]
    return f"{'✓' if sample['correct'] else '✗'} {escape(text)}"
