"""What the doctor found out about one thing."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "fault"]
"""note: a fact that needs no judgement; warning: some runs suffer from it; fault: a run fails by it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is what to do about a warning or a fault: a command where one mends it."""

    name: str
    state: State
    found: str
    remedy: str | None = None
