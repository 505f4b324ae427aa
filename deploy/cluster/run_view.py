"""Shows a run's progress: tails `metrics.jsonl` into a live view, or into plain lines without a terminal."""

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.tracking.balance import IterationTimes, advise
from async_rl.tracking.record_lines import record_of

Record = Mapping[str, Any]
"""One line of `metrics.jsonl`; see `async_rl.tracking.recorder` for its keys."""

NUM_RECENT = 10
PLAIN_EVERY = 10
SPARK_WIDTH = 60
SPARKS = "▁▂▃▄▅▆▇█"


class JsonlTail:
    """Reads the lines appended to a JSONL file from now on; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
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


def make_run_view(console: Console, iterations: int) -> RunView:
    return LiveView(console, iterations) if console.is_terminal else PlainView(console)


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


class LiveView:
    """A panel that is redrawn with every iteration; notes scroll above it, and advice is printed at the end."""

    def __init__(self, console: Console, iterations: int) -> None:
        self._console = console
        self._iterations = iterations
        self._records: list[Record] = []
        self._started_s = time.monotonic()
        # Redrawn by the refresh thread too, so that the clock moves between two iterations.
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if kind is None and self._records:
            self.note(balance(self._records[-NUM_RECENT:]))

    def show(self, record: Record) -> None:
        # A resumed run trains some iterations again.
        self._records = [*(r for r in self._records if r["iteration"] < record["iteration"]), record]
        self._live.refresh()

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def _render(self) -> Panel:
        elapsed_s = time.monotonic() - self._started_s
        if not self._records:
            return Panel(Text(f"waiting for the first iteration, {elapsed_s:.0f} s"), title="async-rl")
        last = self._records[-1]
        done = last["iteration"] + 1
        recent = self._records[-NUM_RECENT:]
        eta_s = sum(record["seconds"] for record in recent) / len(recent) * (self._iterations - done)
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_row(
            Text(f"iteration {done}/{self._iterations}"),
            ProgressBar(total=self._iterations, completed=done),
            Text(f"{_clock(elapsed_s)} elapsed, {_clock(eta_s)} to go"),
        )
        return Panel(Group(head, Text(), _figures(recent), Text(), _curves(self._records)), title="async-rl")


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
    shares = {name: seconds / total_s for name, seconds in spent_s.items()}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def balance(recent: Iterable[Record]) -> str:
    """The number of instances that would have balanced the pools, in a line."""
    return advise([IterationTimes.of(record) for record in recent])


def _figures(recent: list[Record]) -> Table:
    """Means over the last iterations, side by side."""
    mean = {
        key: sum(record[key] for record in recent) / len(recent)
        for key in ("reward_mean", "accuracy", "response_tokens_mean", "tokens_per_s", "seconds")
        if key in recent[-1]
    }
    columns = {
        "reward": f"{mean['reward_mean']:.3f}",
        **({"accuracy": f"{mean['accuracy']:.3f}"} if "accuracy" in mean else {}),
        "response": f"{mean['response_tokens_mean']:.1f} tokens",
        "throughput": f"{mean['tokens_per_s']:.0f} tokens/s",
        "iteration": f"{mean['seconds']:.2f} s",
        **{name: f"{share:.0%}" for name, share in time_shares(recent).items()},
    }
    table = Table(box=None, expand=True, padding=(0, 1))
    for name in columns:
        table.add_column(name, header_style="dim")
    table.add_row(*columns.values())
    return table


def _curves(records: list[Record]) -> Table:
    table = Table.grid(padding=(0, 2))
    for key, name in (("reward_mean", "reward"), ("accuracy", "accuracy")):
        values = [record[key] for record in records if key in record]
        if not values:  # The reward does not define what is correct.
            continue
        table.add_row(Text(name, style="dim"), Text(sparkline(values), style="cyan"), f"{values[-1]:.3f}")
    return table


def sparkline(values: list[float], width: int = SPARK_WIDTH) -> str:
    """Values between 0 and 1 as a line of block characters, averaged down to at most `width` of them."""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(SPARKS[min(len(SPARKS) - 1, max(0, int(mean * len(SPARKS))))] for mean in means)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
