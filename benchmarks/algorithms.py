"""How far each algorithm gets on the quickstart's task in few iterations, and that none collapses there.

    python -m benchmarks.algorithms [--json] [--algorithms NAME ...] [--seeds S ...] [--iterations N] [--dir DIR]
        [--section.key=VALUE ...]

Each seed has the quickstart's base model and words; on them each algorithm trains with the quickstart's config and its
own defaults, as `async-rl run` does. The distillation learns from the model that `grpo` of the same seed ended with.
What is in `DIR` already, of an earlier call with the same options, is not trained again.

An accuracy is the share of held-out words that sampling at temperature 1 solves, in expectation: the mean probability
of the right answers, without the noise of drawing. Prints a Markdown table, or with `--json` one JSON object: for each
seed `start`, the base model's accuracy, and for each algorithm `accuracy` at its end, `reward_first` and `reward_last`,
means over `NUM_ENDS` iterations, and `reward_lowest`, the lowest such mean on the way. The exit code is 1 if an
algorithm ended no better than it began.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from async_rl.algorithms import ALGORITHMS
from async_rl.config.algorithm_traits import TRAITS
from async_rl.config.file import load_config
from async_rl.errors import AsyncRLError
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.local.run import run_config
from deploy.quickstart.kind import KINDS, SPELLING
from deploy.quickstart.splits import read_rows
from deploy.quickstart.summary import NUM_ENDS
from deploy.quickstart.supervised import expected_accuracy
from deploy.quickstart.warm_start import examples

KIND = KINDS[SPELLING]
TEACHER = "grpo"
AT_ONCE = "--inference.max_concurrency=512"
"""The whole batch, which is cheaper: only what is learned counts here, not how early training starts."""
SETTINGS: dict[str, Sequence[str]] = {
    **{name: ("--train.mode=synchronous",) for name, traits in TRAITS.items() if traits.totals},
    # The policy's in the quickstart: a model this small needs it.
    "ppo": ("--critic.learning_rate=8e-4",),
}
"""What an algorithm needs besides its name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    accuracy: float
    reward_first: float
    reward_last: float
    reward_lowest: float


@dataclass(frozen=True, slots=True)
class Course:
    """The runs of one seed, in a folder of their own."""

    directory: Path
    seed: int
    overrides: Sequence[str]

    @property
    def base_model(self) -> Path:
        return self.directory / "base_model"

    def warm_start(self) -> float:
        """Creates base model and words; returns the accuracy to start from."""
        if not self.base_model.exists():
            program = [sys.executable, "-m", "deploy.quickstart.warm_start"]
            subprocess.run([*program, "--seed", str(self.seed), "--run-dir", str(self.directory)], check=True)
        return self._accuracy(self.base_model)

    def train(self, name: str) -> Outcome:
        """Runs the algorithm called `name`, and before it what it learns from.

        Raises:
            AsyncRLError: of the run.
        """
        run_dir = self.directory / name
        if not (run_dir / "model").exists():
            words = self._words(name, run_dir)
            run_config(KIND.config, load_config(KIND.config, words), words, Console(stderr=True))
        rewards = [json.loads(line)["reward_mean"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        means = [fmean(rewards[i : i + NUM_ENDS]) for i in range(max(1, len(rewards) - NUM_ENDS + 1))]
        return Outcome(self._accuracy(run_dir / "model"), means[0], means[-1], min(means))

    def _words(self, name: str, run_dir: Path) -> list[str]:
        words = [
            f"--run.dir={run_dir}",
            f"--run.seed={self.seed}",
            f"--model.path={self.base_model}",
            f"--prompts.source={self.directory / 'data' / 'prompts.jsonl'}",
            f"--reward.name={KIND.reward}",
            f"--algorithm.name={name}",
            AT_ONCE,
            *SETTINGS.get(name, ()),
        ]
        if name == "distillation":
            self.train(TEACHER)
            words.append(f"--algorithm.teacher={self.directory / TEACHER / 'model'}")
        return [*words, *self.overrides]

    def _accuracy(self, model: Path) -> float:
        rows = read_rows(self.directory / "data" / "held_out.jsonl")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        return expected_accuracy(Qwen3ForCausalLM.from_pretrained(model), examples(tokenizer, rows))


@dataclass(frozen=True, slots=True)
class Results:
    """Of one seed."""

    start: float
    outcomes: Mapping[str, Outcome]

    @property
    def worse(self) -> list[str]:
        """The algorithms that ended no better than they began."""
        return [name for name, outcome in self.outcomes.items() if not outcome.accuracy > self.start]


def run(directory: Path, names: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]) -> dict[int, Results]:
    found = {}
    for seed in seeds:
        course = Course(directory / f"seed_{seed}", seed, overrides)
        start = course.warm_start()
        found[seed] = Results(start, {name: course.train(name) for name in names})
    return found


def table(found: Mapping[int, Results]) -> str:
    """A row per algorithm, with accuracy and mean reward of each seed."""
    heads = [f"seed {seed}, from {results.start:.3f} | reward" for seed, results in found.items()]
    lines = [f"| `algorithm.name` | {' | '.join(heads)} |", "|---" * (1 + 2 * len(found)) + "|"]
    for name in next(iter(found.values())).outcomes:
        ends = [results.outcomes[name] for results in found.values()]
        cells = [f"{end.accuracy:.3f} | {end.reward_first:.2f} → {end.reward_last:.2f}" for end in ends]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--iterations", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--dir", type=Path, help="where the runs go (default: a temporary directory)")
    options, overrides = parser.parse_known_args()
    stop_on_signals()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.dir or Path(temporary)
        try:
            words = [f"--train.iterations={options.iterations}", *overrides]
            found = run(directory.absolute(), options.algorithms, options.seeds, words)
        except (Stopped, AsyncRLError) as end:
            return explain_end(end)
    print(json.dumps({str(seed): asdict(results) for seed, results in found.items()}) if options.json else table(found))
    return int(any(results.worse for results in found.values()))


if __name__ == "__main__":
    sys.exit(main())
