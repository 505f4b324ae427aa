"""Shows the findings of a verification: a table in a terminal, lines elsewhere, and `verify.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_rl.shared.files import write_file
from deploy.verify.findings import Finding, all_hold

COLOURS = {"holds": "green", "fails": "bold red", "not tested": "yellow"}


def show(console: Console, findings: Sequence[Finding]) -> None:
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for finding in findings:
            bound = f" (bound: {finding.bound})" if finding.bound else ""
            console.print(
                f"{_named(finding)}: {_outcome(finding)}: {finding.shown}{bound}", markup=False, soft_wrap=True
            )
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in COLOURS}
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), markup=False, highlight=False)


def write_report(path: Path, about: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """`about` first, then `holds`, whether all that was tested holds, and the `findings`."""
    content = {**about, "holds": all_hold(findings), "findings": [asdict(finding) for finding in findings]}
    write_file(path, json.dumps(content, indent=1) + "\n")


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(title="async-rl verify", title_justify="left")
    for column in ("check", "outcome", "shown", "bound"):
        table.add_column(column)
    for finding in findings:
        colour = COLOURS[finding.outcome]
        outcome = f"[{colour}]{escape(_outcome(finding))}[/]"
        table.add_row(escape(_named(finding)), outcome, escape(finding.shown), escape(finding.bound))
    return table


def _named(finding: Finding) -> str:
    return finding.check if finding.subject is None else f"{finding.check} of {finding.subject}"


def _outcome(finding: Finding) -> str:
    return finding.outcome if finding.cause is None else f"{finding.outcome}, {finding.cause}"
