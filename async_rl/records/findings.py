"""What `async-rl verify` and `async-rl audit` report: one finding for each check, whether all that was tested holds,
and how that is shown: a table in a terminal, lines elsewhere, and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_rl.shared.files import write_file

Outcome = Literal["holds", "fails", "not tested"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was `shown`, with figures, and within which `bound`; or why it fails, or was not tested.

    `subject` is the instance that it is about, if it is about one; `cause` the fault by its name, as `docs/verify.md`
    and `docs/audit.md` list them.
    """

    check: str
    outcome: Outcome
    shown: str
    bound: str = ""
    subject: str | None = None
    cause: str | None = None


def holds(check: str, shown: str, bound: str = "", subject: str | None = None) -> Finding:
    return Finding(check, "holds", shown, bound, subject)


def fails(check: str, shown: str, bound: str = "", subject: str | None = None, cause: str | None = None) -> Finding:
    return Finding(check, "fails", shown, bound, subject, cause)


def not_tested(check: str, why: str, subject: str | None = None) -> Finding:
    return Finding(check, "not tested", why, subject=subject)


def all_hold(findings: Sequence[Finding]) -> bool:
    """Whether something was tested, and all of it holds."""
    tested = [finding for finding in findings if finding.outcome != "not tested"]
    return bool(tested) and all(finding.outcome == "holds" for finding in tested)


COLOURS = {"holds": "green", "fails": "bold red", "not tested": "yellow"}


def show(console: Console, findings: Sequence[Finding], title: str) -> None:
    if console.is_terminal:
        console.print(_table(findings, title))
    else:
        for finding in findings:
            bound = f" (bound: {finding.bound})" if finding.bound else ""
            console.print(
                f"{_named(finding)}: {_outcome(finding)}: {finding.shown}{bound}", markup=False, soft_wrap=True
            )
    counts = {outcome: sum(finding.outcome == outcome for finding in findings) for outcome in COLOURS}
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), markup=False, highlight=False)


def report(about: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    """As JSON: `about` first, then `holds`, whether all that was tested holds, and the `findings`."""
    content = {**about, "holds": all_hold(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(content, indent=1) + "\n"


def write_report(path: Path, about: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    write_file(path, report(about, findings))


def _table(findings: Sequence[Finding], title: str) -> Table:
    table = Table(title=title, title_justify="left")
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
