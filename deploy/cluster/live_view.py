"""The live view of a run in a terminal, for `async-rl run`, `launch ray` and `watch`; it fits itself into any size."""

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.cluster.live_panels import bars, figures, pool
from deploy.cluster.pool_watch import PoolWatch
from deploy.cluster.run_view import NUM_RECENT, PlainView, Record, RunView, balance, clock, progress

_FRAME = 2
"""Lines, and with the spaces beside it twice as many columns."""

_MAX_BARS = 12

_ROOM_FOR_TIMES = 5
"""The line of the queue, two bars, what they mean, and a gap."""

_ROOM_FOR_PROGRESS = 60


def make_run_view(console: Console, run_dir: Path, token: str | None) -> RunView:
    """`token`: of the run's fleet endpoint, where it needs one."""
    can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(console, PoolWatch(run_dir, token)) if can_draw else PlainView(console)


class LiveView:
    """A panel that is redrawn four times a second; notes scroll above it, and advice is printed at the end."""

    def __init__(self, console: Console, pool_watch: PoolWatch) -> None:
        self._console = console
        self._pool = pool_watch
        self._records: list[Record] = []
        self._began_unix_s = time.time()
        self._closing = ExitStack()
        # Redrawn by the refresh thread too, so that the clock moves between two iterations.
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, vertical_overflow="crop")

    def __enter__(self) -> "LiveView":
        self._closing.enter_context(self._pool)
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        self._closing.close()
        if kind is None and self._records:
            self.note(balance(self._records[-NUM_RECENT:]))

    def show(self, record: Record) -> None:
        # A resumed run trains some iterations again.
        while self._records and self._records[-1]["iteration"] >= record["iteration"]:
            self._records.pop()
        self._records.append(record)

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False)

    def tick(self) -> None:
        """Draws itself."""

    def _render(self) -> RenderableType:
        records = list(self._records)
        width, height = self._console.size
        width, height = width - 2 * _FRAME, height - 1 - _FRAME
        if not records:
            waited = Text(f"waiting for the first iteration, {clock(time.time() - self._began_unix_s)}")
            waited.truncate(max(1, width), overflow="ellipsis")
            return Panel(Group(waited, *self._pool_part(width, height - 2)), title="async-rl")
        parts: list[RenderableType] = [self._head(records, width)]
        left = height - 1
        if left > 2:
            # However low the terminal is, it shows where the time went, too.
            table = figures(records, width, max(left - _ROOM_FOR_TIMES, left // 2))
            parts.append(table)
            left -= table.row_count + 1
        pool_part = self._pool_part(width, left // 2)
        parts += pool_part
        left -= sum(isinstance(part, Table) and part.row_count + 1 for part in pool_part)
        if left > 2:
            parts.append(_queue_line(records[-1], width))
            parts.append(bars(records, width, min(left - 1, _MAX_BARS)))
        return Panel(Group(*parts), title="async-rl")

    def _pool_part(self, width: int, height: int) -> list[RenderableType]:
        rows = self._pool.rows
        return [pool(rows, width, height)] if rows and height > 2 else []

    def _head(self, records: list[Record], width: int) -> RenderableType:
        last = records[-1]
        done, iterations, recent = last["iteration"] + 1, last["iterations"], records[-NUM_RECENT:]
        to_go_s = statistics.median(record["seconds"] for record in recent) * max(0, iterations - done)
        times = Text(f"{clock(self._elapsed_s(records))} elapsed, {clock(to_go_s)} to go")
        if width < _ROOM_FOR_PROGRESS:
            line = Text(f"{done}/{iterations} done  ") + times
            line.truncate(width)
            return line
        head = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            head.add_column(no_wrap=True, ratio=ratio)
        head.add_row(Text(progress(last)), ProgressBar(total=iterations, completed=done), times)
        return head

    def _elapsed_s(self, records: list[Record]) -> float:
        """Since the first iteration of the records began; without a trainer that answers, until the last one ended."""
        first, last = records[0].get("started_unix_s", self._began_unix_s), records[-1]
        if not self._pool.has_fleet and "started_unix_s" in last:
            return float(last["started_unix_s"] + last["seconds"] - first)
        return time.time() - float(first)


def _queue_line(last: Record, width: int) -> Text:
    """The queue and the balance of the last iteration, as far as the record has them."""
    said = []
    if "queue_groups_max" in last:
        said.append(f"queue: up to {last['queue_groups_max']} groups, {last.get('queue_wait_s_mean') or 0:.2f} s each")
    if "desired_instances" in last:
        said.append(f"instances: {last['num_instances']}, {last['desired_instances']} would balance the pools")
    line = Text("; ".join(said), style="dim")
    line.truncate(width, overflow="ellipsis")
    return line
