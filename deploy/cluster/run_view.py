"""Shows a run's progress: tails `metrics.jsonl` into plain lines; `live_view.py` is the view of a terminal."""

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console

from async_rl.tracking.balance import IterationTimes, advise
from async_rl.tracking.record_lines import record_of

Record = Mapping[str, Any]
"""One line of `metrics.jsonl`; see `async_rl.tracking.recorder` for its keys."""

NUM_RECENT = 10
PLAIN_EVERY = 10


class JsonlTail:
    """Reads the lines appended to a JSONL file from now on, or `from_start`; the file may not exist yet."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._inode = path.stat().st_ino if path.exists() else None

    def read_new(self) -> list[dict[str, Any]]:
        """Records completed since the last call; an incomplete line is left for the next call.

        A file that was replaced, as when a run resumes, is read from its beginning. One that cannot be read at the
        moment is tried again with the next call.
        """
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self._inode not in (None, inode):
                    self._offset = 0
                self._inode = inode
                file.seek(self._offset)
                *lines, _unfinished = file.read().split(b"\n")
        except OSError:
            return []
        self._offset += sum(len(line) + 1 for line in lines)
        return [record for line in lines if (record := record_of(line)) is not None]


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


class PlainView:
    """One line for the first iteration and every `PLAIN_EVERY`, and one of advice at the end: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._recent: deque[Record] = deque(maxlen=NUM_RECENT)

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._recent:
            self.note(balance(self._recent))

    def show(self, record: Record) -> None:
        self._recent.append(record)
        done, total = record["iteration"] + 1, record["iterations"]
        if done == 1 or done % PLAIN_EVERY == 0 or done == total:
            self.note(f"iteration {done}/{total}  {describe(record)}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(record: Record) -> str:
    """The metrics of one iteration in a line."""
    shares = "  ".join(f"{name} {share:.0%}" for name, share in time_shares([record]).items())
    skipped = "NO STEP TAKEN (gradient not finite)  " if record.get("skipped_steps") else ""
    untrained = f"no gradient {share:.0%}  " if (share := record.get("untrained_groups")) else ""
    accuracy = f"accuracy {record['accuracy']:.3f}  " if "accuracy" in record else ""
    turns = f"turns {record['turns_mean']:.1f}  " if "turns_mean" in record else ""
    return (
        f"{skipped}reward {record['reward_mean']:.3f}  {accuracy}"
        f"{untrained}response {record['response_tokens_mean']:.1f} tokens  {turns}"
        f"{record['tokens_per_s']:.0f} tokens/s  {record['seconds']:.2f} s  ({shares})"
    )


def time_shares(records: Sequence[Record]) -> dict[str, float]:
    """Shares of the trainer's wall time, which add up to 1: waiting, training, publishing, other."""
    total_s = sum(record["seconds"] for record in records)
    spent_s = {
        "waiting": sum(record["wait_s"] for record in records),
        "training": sum(record["train_s"] + record["step_s"] for record in records),
        "publishing": sum(record["publish_s"] for record in records),
    }
    shares = {name: seconds / total_s if total_s > 0 else 0.0 for name, seconds in spent_s.items()}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def balance(recent: Iterable[Record]) -> str:
    """The number of instances that would have balanced the pools, in a line."""
    return advise([IterationTimes.of(record) for record in recent])
