"""`async-rl samples RUN`: prompts, responses and rewards of a run in the terminal, from `samples.jsonl`.

Exit codes: 0 success, also if no sample is like that; 2 no such run, or an invalid option.
"""

import argparse
import heapq
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from async_rl.errors import ConfigError
from async_rl.parts.dashboard.run_data import RunData, open_run, responses_of
from async_rl.records.run_records import number_of
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text, harmless

DEFAULT_NUM = 10
"""Samples without an option that says how many."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One recorded response with its prompt; `reward` is None where the record has no finite one."""

    iteration: int
    index: int
    prompt_id: str
    prompt: str
    text: str
    reward: float | None
    num_tokens: int | None
    finish_reason: str
    row: Mapping[str, Any]

    def contains(self, pattern: re.Pattern[str]) -> bool:
        return bool(pattern.search(self.prompt) or pattern.search(self.text))


def samples_of(run: RunData) -> Iterator[Sample]:
    """All that are kept, oldest first."""
    for row in run.all_samples():
        for response in responses_of(row):
            yield _sample(row, response)


def _sample(row: dict[str, Any], response: dict[str, Any]) -> Sample:
    iteration, index = (value if isinstance(value := row.get(name), int) else -1 for name in ("iteration", "index"))
    return Sample(
        iteration=iteration,
        index=index,
        prompt_id=str(row.get("prompt_id", "")),
        prompt=str(row.get("prompt", "")),
        text=str(response.get("text", "")),
        reward=number_of(response.get("reward")),
        num_tokens=num_tokens if isinstance(num_tokens := response.get("num_tokens"), int) else None,
        finish_reason=str(response.get("finish_reason", "")),
        row=of_row if isinstance(of_row := row.get("row"), dict) else {},
    )


def choose(samples: Iterable[Sample], num: int, order: str) -> list[Sample]:
    """The `num` that are "worst", "best" or "newest"; of equal rewards the newest. Only the newest may have none."""
    if order == "newest":
        return list(deque(samples, maxlen=num))[::-1]
    sign = -1.0 if order == "worst" else 1.0
    scored = (sample for sample in samples if sample.reward is not None)
    return heapq.nlargest(num, scored, key=lambda sample: (sign * (sample.reward or 0.0), sample.iteration))


def show(sample: Sample, console: Console) -> None:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    facts = f"iteration {sample.iteration}, group {sample.index}, prompt {sample.prompt_id}"
    num_tokens = "?" if sample.num_tokens is None else sample.num_tokens
    title = f"{reward}  {facts}, {num_tokens} tokens, {sample.finish_reason}"
    console.rule(Text(_shown(title, console.encoding)), align="left")
    console.print(Text(_shown(sample.prompt, console.encoding), "dim"), soft_wrap=True)
    for name, value in sample.row.items():
        console.print(Text(_shown(f"{name}: {value}", console.encoding), "cyan"), soft_wrap=True)
    console.print(Text(_shown(sample.text, console.encoding)), soft_wrap=True)


def _shown(text: str, encoding: str) -> str:
    """A model's text without what would control the terminal, and with characters that the terminal can show."""
    return harmless(text).encode(encoding, "replace").decode(encoding)


def make_parser() -> Parser:
    parser = Parser("async-rl samples", "Shows prompts, responses and rewards of a run.", "RUN_DIR [OPTIONS]")
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="run.dir of a run")
    parser.add_argument("--worst", type=int, metavar="N", help="those of the lowest rewards")
    parser.add_argument("--best", type=int, metavar="N", help="those of the highest rewards")
    parser.add_argument("--newest", type=int, metavar="N", help=f"the default, with N = {DEFAULT_NUM}")
    parser.add_argument("--iteration", type=int, metavar="I", help="of this iteration only")
    parser.add_argument("--grep", metavar="REGEX", help="whose prompt or response has it, in any case of letters")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def wanted_samples(options: argparse.Namespace) -> list[Sample]:
    """
    Raises:
        ConfigError: an option is invalid, or there is no such run.
    """
    orders = [(name, num) for name in ("worst", "best", "newest") if (num := getattr(options, name)) is not None]
    if len(orders) > 1:
        raise ConfigError(f"--{orders[0][0]} and --{orders[1][0]} exclude each other: give one")
    order, num = orders[0] if orders else ("newest", DEFAULT_NUM)
    if not 1 <= num <= sys.maxsize:
        raise ConfigError(f"--{order} {num}: expected a number of samples, 1 to {sys.maxsize}")
    try:
        pattern = re.compile(options.grep or "", re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--grep {options.grep!r} is not a regular expression: {error}") from error
    samples = (
        sample
        for sample in samples_of(open_run(options.run))
        if options.iteration in (None, sample.iteration) and sample.contains(pattern)
    )
    return choose(samples, num, order)


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        samples = wanted_samples(options)
    except ConfigError as error:
        print(f"async-rl samples: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    console = Console(highlight=False)
    if options.json:
        for sample in samples:
            console.out(json.dumps(asdict(sample)))
        return 0
    for sample in samples:
        show(sample, console)
    if not samples:
        print("async-rl samples: no recorded sample is like this", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
