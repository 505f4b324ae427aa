"""What the dashboard's server answers, whichever server it runs in: the page's files, and the records as JSON.

The page is open, the records are what a token protects: a browser sends no token when it opens an address. `__main__`
answers from it for `async-rl dashboard`, `fleet_routes` at the fleet endpoint of a live run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any

from async_rl.parts.dashboard.run_data import RunData, SampleFilter, as_json, names_of

PREFIX = "/dashboard/"

MODULES = (
    "format.js",
    "metric_names.js",
    "source.js",
    "curves.js",
    "lengths.js",
    "period.js",
    "instances.js",
    "samples.js",
    "proof.js",
    "main.js",
)
"""The page's own scripts, each after those that it imports."""

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

STATIC = ("index.html", "style.css", "icon.svg", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", *MODULES)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Records change, and a new release brings other scripts.
    "Cache-Control": "no-store",
}
"""Of every answer: nothing in the page runs or loads what the server did not send."""

POLL_S = 1.0
"""How often the records are looked at for a page that is open."""

KEEP_ALIVE_S = 15.0
"""A line at least so often shows both ends that the other is there."""

MAX_SAMPLES = 50
"""Rows of samples in one answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


class Dashboard:
    """The page on several runs, in the given order. Its methods may block for reading files."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self._runs = runs
        self._data: dict[str, Callable[[Mapping[str, str]], Any]] = {
            "api/runs": self._about,
            "api/about": lambda query: self._run(query).about(),
            "api/records": self._records,
            "api/periods": lambda query: self._run(query).periods(),
            "api/period": lambda query: self._run(query).period(_integer(query, "iteration")),
            "api/samples": self._samples,
        }

    @staticmethod
    def open_paths() -> tuple[str, ...]:
        """The paths that show nothing of a run."""
        return (PREFIX, *(f"{PREFIX}{name}" for name in STATIC))

    def answer(self, path: str, query: Mapping[str, str]) -> Answer:
        """The response to a GET of a path, whose query has each name once."""
        name = path.removeprefix(PREFIX) or "index.html"
        if name in STATIC:
            return Answer(HTTPStatus.OK, CONTENT_TYPES[Path(name).suffix], static_file(name).encode())
        if name not in self._data:
            return error_answer(HTTPStatus.NOT_FOUND, f"{path} is no path of the dashboard")
        try:
            content = self._data[name](query)
        except ValueError as error:
            return error_answer(HTTPStatus.BAD_REQUEST, str(error))
        return Answer(HTTPStatus.OK, "application/json", as_json(content).encode())

    def states(self) -> str:
        """How many entries the records have by now, as an event's data."""
        return as_json([asdict(run.follow()) for run in self._runs])

    def _about(self, query: Mapping[str, str]) -> Any:
        names = zip(names_of(self._runs), self._runs, strict=True)
        return {"runs": [{"name": name, "dir": str(run.run_dir)} for name, run in names], "is_live": True}

    def _records(self, query: Mapping[str, str]) -> Any:
        numbers = (_integer(query, name, 0) for name in ("generation", "num_records", "num_proofs"))
        return self._run(query).records(*numbers)

    def _samples(self, query: Mapping[str, str]) -> Any:
        wanted = SampleFilter(
            iteration=_integer(query, "iteration") if query.get("iteration") else None,
            lowest=_number(query, "lowest", "-inf"),
            highest=_number(query, "highest", "inf"),
            text=query.get("text", ""),
        )
        limit = min(MAX_SAMPLES, _integer(query, "limit", MAX_SAMPLES))
        return self._run(query).samples(wanted, _integer(query, "skip", 0), limit)

    def _run(self, query: Mapping[str, str]) -> RunData:
        number = _integer(query, "run")
        if number >= len(self._runs):
            raise ValueError(f"run {number} does not exist: there are {len(self._runs)}, counted from 0")
        return self._runs[number]


class Events:
    """What one open page is told, as server-sent events: the states whenever they change."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._sent = ""
        self._sent_s = 0.0

    def next(self) -> bytes:
        """What to send now; empty if nothing."""
        states = self._dashboard.states()
        now_s = time.monotonic()
        if states != self._sent:
            self._sent, self._sent_s = states, now_s
            return f"data: {states}\n\n".encode()
        if now_s - self._sent_s > KEEP_ALIVE_S:
            self._sent_s = now_s
            return b": alive\n\n"
        return b""


EVENTS_PATH = f"{PREFIX}api/events"


def static_file(name: str) -> str:
    """The content of one of the page's files."""
    return files("async_rl.parts.dashboard").joinpath("static", name).read_text(encoding="utf-8")


def error_answer(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, "application/json", as_json({"error": message}).encode())


def _integer(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = query.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(f"{name} {text!r} is not a whole number: write {name}=0 or more")
    return int(text)


def _number(query: Mapping[str, str], name: str, default: str) -> float:
    text = query.get(name) or default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a number") from None
