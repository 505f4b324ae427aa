"""The live view of a run in a terminal, for `async-rl run`, `launch ray` and `watch`; it fits itself into any size.

Its rows of instances come from the run's fleet endpoint, or else from its last proof: one background thread asks every
`POLL_S` seconds, so that a view never waits for an answer.
"""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.records.run_records import RunRecords, natural_order, number_of
from async_rl.shared.protocol.fleet import FleetInfo
from deploy.cluster.fleet import read_fleet
from deploy.cluster.run_view import (
    NUM_RECENT,
    PLAIN_EVERY,
    PlainView,
    Record,
    RunView,
    balance,
    clock,
    printable,
    progress,
    time_shares,
)

_FRAME = 2
"""Lines, and with the spaces beside it twice as many columns."""

_MAX_BARS = 12

_ROOM_FOR_TIMES = 5
"""The line of the queue, two bars, what they mean, and a gap."""

_ROOM_FOR_PROGRESS = 60

POLL_S = 2.0

SPARKS = "▁▂▃▄▅▆▇█"

FIGURES = (
    ("reward", "reward_mean", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("response tokens", "response_tokens_mean", "{:.1f}"),
    ("truncated", "truncated_share", "{:.1%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("KL", "kl", "{:.2e}"),
    ("gap, largest", "max_logprob_gap", "{:.1e}"),
    ("gradient norm", "grad_norm", "{:.3g}"),
    ("adapters kept", "merged_share", "{:.1%}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("overlap", "overlap_efficiency", "{:.0%}"),
)
"""(name, key in a record, format), the most important first: a low terminal shows only the first ones."""

_ROOM_FOR_CURVE = 52
_ROOM_FOR_MEAN = 40


@dataclass(frozen=True, slots=True)
class TimeShare:
    """A part of an iteration's time, by its name in `time_shares`; drawn so that it can be told without colours."""

    name: str
    symbol: str
    style: str


PARTS = (
    TimeShare("publishing", "▒", "blue"),
    TimeShare("canary", "▓", "magenta"),
    TimeShare("training", "█", "green"),
    TimeShare("waiting", "░", "yellow"),
    TimeShare("evaluating", "▚", "cyan"),
    TimeShare("other", "·", "dim"),
)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One instance; `share` of all response tokens so far, or of the last step's where no fleet answers."""

    name: str
    state: str
    share: float
    tokens_per_s: float | None = None
    num_requests: int | None = None


class PoolWatch:
    """A context for the duration of a view."""

    def __init__(self, run_dir: Path, token: str | None) -> None:
        self._run_dir = run_dir
        self._token = token
        self._proofs = RunRecords(run_dir).ledger
        self._last_proof: Record = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="async-rl-pool-watch", daemon=True)
        self.rows: tuple[PoolRow, ...] = ()
        """The latest; replaced as a whole."""
        self.has_fleet = False
        """Whether the fleet endpoint answered."""

    def __enter__(self) -> "PoolWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def look(self) -> None:
        """Asks once."""
        for proof in self._proofs.new_records():
            self._last_proof = proof
        fleet = read_fleet(self._run_dir, self._token)
        self.has_fleet = fleet is not None
        self.rows = rows_of_fleet(fleet) if fleet is not None else rows_of_proof(self._last_proof)

    def _poll(self) -> None:
        while not self._ending.is_set():
            self.look()
            self._ending.wait(POLL_S)


def make_run_view(console: Console, run_dir: Path, token: str | None, every: int = PLAIN_EVERY) -> RunView:
    """`token`: of the run's fleet endpoint, where it needs one; `every`: of plain lines, see `PlainView`."""
    can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(console, PoolWatch(run_dir, token)) if can_draw else PlainView(console, every=every)


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


def values_of(records: Sequence[Record], key: str) -> list[float]:
    """The finite numbers that the records have under the key."""
    return [value for record in records if (value := number_of(record.get(key))) is not None]


def figures(records: Sequence[Record], width: int, height: int) -> Table:
    """A row for each figure that any record has: its last value, its mean over recent records, its curve."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    if width >= _ROOM_FOR_MEAN:
        table.add_column(f"mean of {min(NUM_RECENT, len(records))}", justify="right", style="dim", no_wrap=True)
    if width >= _ROOM_FOR_CURVE:
        table.add_column("", style="cyan", no_wrap=True)
    for name, key, form in FIGURES:
        values = values_of(records, key)
        if not values or table.row_count >= height - 1:
            continue
        last = values_of(records[-1:], key)
        recent = values_of(records[-NUM_RECENT:], key) or values[-1:]
        cells = [name, form.format(last[0]) if last else "-"]
        if width >= _ROOM_FOR_MEAN:
            cells.append(form.format(sum(recent) / len(recent)))
        if width >= _ROOM_FOR_CURVE:
            cells.append(sparkline(values, width - _ROOM_FOR_CURVE + 10))
        table.add_row(*cells)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Values from their least to their largest as a line of block characters, averaged down to at most `width`."""
    size = max(1, -(-len(values) // max(1, width)))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    if not high > low:
        return SPARKS[0] * len(means)
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / (high - low) * len(SPARKS)))] for mean in means)


def bars(records: Sequence[Record], width: int, height: int) -> Text:
    """A bar for each of the last iterations, as long as the iteration, of its parts; and what these are."""
    last = records[-max(1, height - 1) :]
    room = max(4, width - 18)
    longest_s = max(record["seconds"] for record in last)
    lines = []
    for record in last:
        line = Text(f"{record['iteration']:>6} ", style="dim")
        length = room * record["seconds"] / longest_s if longest_s > 0 else 0
        shares, drawn, until = time_shares([record]), 0, 0.0
        for part in PARTS:
            until += shares.get(part.name, 0.0) * length
            num_cells = max(0, min(room, round(until)) - drawn)
            line.append(part.symbol * num_cells, style=part.style)
            drawn += num_cells
        line.append(f" {record['seconds']:.2f} s", style="dim")
        lines.append(line)
    return Text("\n").join([*lines, _legend(width, time_shares(last))])


def _legend(width: int, shares: Mapping[str, float]) -> Text:
    """What the symbols of the bars mean, in as much room as there is."""
    legend = Text()
    for indent, shorter in ((7, ""), (0, ""), (0, "ing")):
        legend = Text(" " * indent)
        for part in (part for part in PARTS if part.name in shares):
            legend.append(f"{part.symbol} ", style=part.style)
            legend.append(f"{part.name.removesuffix(shorter)}  ", style="dim")
        legend.rstrip()
        if legend.cell_len <= width:
            return legend
    legend.truncate(width)
    return legend


def pool(rows: Sequence[PoolRow], width: int, height: int) -> Table:
    """A row for each instance, as many as fit, and how many do not."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("instance", "state", "tokens/s", "share of work", "requests")[: 5 if width >= 70 else 3]:
        right = name not in ("instance", "state")
        table.add_column(name, header_style="dim", justify="right" if right else "left", no_wrap=True)
    fitting = rows if len(rows) <= height - 1 else rows[: max(0, height - 2)]
    for row in fitting:
        speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}"
        requests = "-" if row.num_requests is None else str(row.num_requests)
        state = Text(row.state or "-", style="green" if row.state == "ready" else "yellow")
        cells: list[Text | str] = [
            printable(row.name),
            state,
            speed,
            f"{row.share:.{0 if row.share >= 0.095 else 1}%}",
            requests,
        ]
        table.add_row(*cells[: len(table.columns)])
    if len(fitting) < len(rows):
        table.add_row(Text(f"and {len(rows) - len(fitting)} more", style="dim"))
    return table


def rows_of_fleet(fleet: FleetInfo) -> tuple[PoolRow, ...]:
    total = sum(info.num_tokens for info in fleet.instances)
    rows = [
        PoolRow(info.name, info.state, info.num_tokens / total if total else 0.0, info.tokens_per_s, info.num_requests)
        for info in fleet.instances
    ]
    # What needs attention first.
    return tuple(sorted(rows, key=lambda row: (row.state == "ready", natural_order(row.name))))


def rows_of_proof(proof: Record) -> tuple[PoolRow, ...]:
    """From a line of `ledger.jsonl`, which may be of anything."""
    gaps = proof.get("logprob_gaps")
    instances = gaps.get("instances") if isinstance(gaps, dict) else None
    if not isinstance(instances, dict):
        return ()
    tokens = {
        name: each["tokens"]
        for name, each in instances.items()
        if isinstance(each, dict) and isinstance(each.get("tokens"), int)
    }
    total = sum(tokens.values())
    return tuple(
        PoolRow(name, "", tokens[name] / total if total else 0.0) for name in sorted(tokens, key=natural_order)
    )
