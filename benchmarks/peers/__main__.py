"""The same GRPO work with async-rl and with TRL's GRPOTrainer, in turn.

    python -m benchmarks.peers --json --trl-python PYTHON [--repeats N] [--iterations N] [--minutes M]
        [--kl-coef C ...] [--engine vllm] [--cases CASE ...]

`PYTHON` has TRL (`make bench-peers` makes an environment for it). Both sides train the same random Qwen3 in float32 on
the same prompts, `GROUPS` of `P` tokens, each with `G` responses of exactly 64 tokens, with AdamW; a `CASE` is written
`SIZE:P:G:GROUPS`. With a `--kl-coef` above 0 there is a reference. Every process has one thread. TRL generates with
transformers' `generate`: with vLLM it cannot on a CPU (see docs/benchmarks.md). It trains with the fastest of the
micro-batches that `MICRO_BATCHES` lists. async-rl is `async-rl run` with one instance, of the embedded engine or vLLM.

Cases take turns until each has `--repeats` pairs or the next pair would exceed `--minutes`; a case that got none is in
`left_out`. Counted is the time from the end of the second iteration on. The last line is one JSON object. What both
sides compute from the same samples is compared first (`losses.py`), by algorithm: `loss_difference.ALGORITHM`,
`grad_norm_difference.ALGORITHM`. Then, for each case, with `:kl=C` behind its name where there is a reference:

- `ours_per_cpu_s.CASE`, `trl_per_cpu_s.CASE`: median response tokens per processor second of all processes;
- `cpu_ratio.CASE`: median over pairs of ours / TRL's; `pairs.CASE`: how many;
- `ours_per_s.CASE`, `trl_per_s.CASE`, `wall_ratio.CASE`: the same per second on the clock. async-rl uses two cores, TRL
  one.

However the benchmark ends, no process of it is left.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common.case import Case
from benchmarks.peers.losses import compare
from benchmarks.peers.sides import MICRO_BATCHES, WARM_UP, Speed, run_ours, run_trl
from benchmarks.peers.work import EMBEDDED, Engine

DEFAULT = ("2M:80:8:8", "2M:512:8:4", "31M:80:8:4", "31M:512:8:2")


class Contest(NamedTuple):
    """A case with or without a reference."""

    case: Case
    kl_coef: float

    def __str__(self) -> str:
        return f"{self.case}:kl={self.kl_coef:g}" if self.kl_coef else str(self.case)


class Pair(NamedTuple):
    ours: Speed
    trl: Speed


class Measurement:
    """The pairs of each contest so far, and what the next one would take."""

    def __init__(self, iterations: int, engine: Engine, trl_python: str, minutes: float) -> None:
        self._iterations = iterations
        self._engine = engine
        self._python = trl_python
        self._deadline = time.monotonic() + 60 * minutes
        self._seconds: dict[Contest, float] = {}
        self._micro_batches: dict[Case, int] = {}
        self.pairs: dict[Contest, list[Pair]] = {}

    def add_pair(self, contest: Contest) -> None:
        """Measures one more pair, unless there is no time for it."""
        begun = time.monotonic()
        if begun + self._seconds.get(contest, 0.0) > self._deadline:
            return
        case, kl_coef = contest
        if case not in self._micro_batches:
            self._micro_batches[case] = self._fastest_micro_batch(contest)
            begun = time.monotonic()
        ours = run_ours(case, kl_coef, self._iterations, self._engine)
        trl = run_trl(case, kl_coef, self._iterations, self._python, self._micro_batches[case])
        self.pairs.setdefault(contest, []).append(Pair(ours, trl))
        self._seconds[contest] = time.monotonic() - begun
        say(f"{contest}: ours {ours.per_cpu_s:.0f}, TRL {trl.per_cpu_s:.0f} tokens per processor second")

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for contest, pairs in self.pairs.items():
            found[f"pairs.{contest}"] = len(pairs)
            found[f"trl_micro_batch.{contest}"] = self._micro_batches[contest.case]
            for field, name in (("per_cpu_s", "cpu"), ("per_s", "wall")):
                ours, trl = ([getattr(side, field) for side in sides] for sides in zip(*pairs, strict=True))
                ratios = [our / their for our, their in zip(ours, trl, strict=True)]
                found[f"ours_{field}.{contest}"] = statistics.median(ours)
                found[f"trl_{field}.{contest}"] = statistics.median(trl)
                found[f"{name}_ratio.{contest}"] = statistics.median(ratios)
        return {key: round(value, 3) for key, value in found.items()}

    def _fastest_micro_batch(self, contest: Contest) -> int:
        case, kl_coef = contest
        fitting = [size for size in MICRO_BATCHES if case.num_responses % size == 0 and size % case.group_size == 0]
        if len(fitting) < 2:
            return fitting[0] if fitting else case.group_size
        found: dict[int, float] = {}
        for size in fitting:
            found[size] = run_trl(case, kl_coef, WARM_UP + 1, self._python, size).per_cpu_s
            say(f"{contest}: TRL with micro-batches of {size}: {found[size]:.0f} tokens per processor second")
        return max(found, key=found.__getitem__)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compare_losses(trl_python: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        return compare(Path(directory), trl_python)


def run(contests: Sequence[Contest], repeats: int, measurement: Measurement, trl_python: str) -> dict[str, Any]:
    differences = compare_losses(trl_python)
    say(f"the same samples on both sides: {differences}")
    for _ in range(repeats):
        for contest in contests:
            measurement.add_pair(contest)
    left_out = [str(contest) for contest in contests if contest not in measurement.pairs]
    return {**differences, **measurement.figures(), "left_out": left_out}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="The same GRPO work with async-rl and with TRL."
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object to standard output")
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of each case at most (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=5, help="of each run, from 3 on (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no pair after that (default: %(default)s)")
    parser.add_argument(
        "--kl-coef", type=float, nargs="+", default=[0.0], help="weights of the KL to a reference; 0 has none"
    )
    parser.add_argument(
        "--engine", choices=["transformers", "vllm"], default="transformers", help="of async-rl (default: %(default)s)"
    )
    parser.add_argument(
        "--vllm-python",
        default=".venv-vllm/bin/python",
        help="interpreter of an environment with vLLM, as `make vllm` makes it (default: %(default)s)",
    )
    parser.add_argument(
        "--cases",
        type=Case.parse,
        nargs="+",
        default=[Case.parse(text) for text in DEFAULT],
        metavar="SIZE:P:G:GROUPS",
        help=f"by default {' '.join(DEFAULT)}",
    )
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.iterations <= WARM_UP:
        parser.error(f"--iterations {options.iterations}: the first {WARM_UP} are not counted, give more")
    # As an exception, so that directories and processes are cleared away.
    # Of SIGINT, too: a shell starts background jobs with SIGINT ignored, and Python leaves it so.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    engine = Engine("vllm", str(Path(options.vllm_python).absolute())) if options.engine == "vllm" else EMBEDDED
    contests = [Contest(case, kl_coef) for case in options.cases for kl_coef in options.kl_coef]
    measurement = Measurement(options.iterations, engine, options.trl_python, options.minutes)
    print(json.dumps(run(contests, options.repeats, measurement, options.trl_python)))


if __name__ == "__main__":
    main()
