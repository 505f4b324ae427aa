"""The parts of the live view, as pure functions of records: figures with curves, a bar per iteration, the pool."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from deploy.cluster.pool_watch import PoolRow
from deploy.cluster.run_view import NUM_RECENT, Record, time_shares

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
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("overlap", "overlap_efficiency", "{:.0%}"),
)
"""(name, key in a record, format), the most important first: a low terminal shows only the first ones."""

_ROOM_FOR_CURVE = 52
_ROOM_FOR_MEAN = 40


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an iteration's time, by its name in `time_shares`; drawn so that it can be told without colours."""

    name: str
    symbol: str
    style: str


PARTS = (
    Part("publishing", "▒", "blue"),
    Part("canary", "▓", "magenta"),
    Part("training", "█", "green"),
    Part("waiting", "░", "yellow"),
    Part("evaluating", "▚", "cyan"),
    Part("other", "·", "dim"),
)


def values_of(records: Sequence[Record], key: str) -> list[float]:
    """The finite numbers that the records have under the key."""
    values = [record.get(key) for record in records]
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


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


def printable(text: str) -> Text:
    """Without control characters: names are other programs' text."""
    return Text("".join(char if char.isprintable() else " " for char in text))
