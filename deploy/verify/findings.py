"""What `async-rl verify` reports: one finding for each check, and whether all that was tested holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["holds", "fails", "not tested"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was `shown`, with figures, and within which `bound`; or why it fails, or was not tested.

    `subject` is the instance that it is about, if it is about one; `cause` the fault by its name, as `docs/verify.md`
    lists them.
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
